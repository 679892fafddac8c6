"""A request whose prompt still arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from trimaran.core.errors import RequestError
from trimaran.core.outputs import SequenceDelta
from trimaran.core.request import Request
from trimaran.engine.chat_frame import ChatFrame
from trimaran.engine.delta_inbox import DeltaInbox
from trimaran.engine.thread import EngineThread
from trimaran.models.tokenizer import Tokenizer

IDLE_SECONDS = 60.0


class OpenRequest(DeltaInbox):
    """Takes a prompt in pieces and streams its answer; for one event loop.

    While text arrives, the tokens that nothing can change any more are computed beside the
    other requests, so that after `finish` only the last few are left. The tokens are those of
    the whole text, and so is the answer. Until then the request holds no memory that another
    one needs: what it has computed is given up for those that can go on.

    Example:
        >>> async with engine.open(params) as request:
        ...     async for words in microphone:
        ...         request.append(words)
        ...     request.finish()
        ...     async for delta in request:
        ...         print(delta.text, end="")
    """

    def __init__(
        self,
        thread: EngineThread,
        request: Request,
        tokenizer: Tokenizer,
        deliver: Callable[[asyncio.Queue[SequenceDelta], list[SequenceDelta]], None],
        *,
        chat: ChatFrame | None,
        idle_seconds: float,
    ) -> None:
        """As `AsyncEngine.open`, which makes them. `deliver` brings deltas into the loop."""
        super().__init__(request)
        self.id = request.id
        self._thread = thread
        self._chat = chat
        self._tokenizer = tokenizer
        self._encoder = tokenizer.incremental(add_special_tokens=chat is None)
        self._typed: list[str] = []
        self._begun = False  # something but white space was typed
        self._spaces = ""  # at the end of what was typed
        self._complete = False
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        thread.open(request, lambda deltas: deliver(self._queue, deltas))
        self._timer = self._loop.call_later(idle_seconds, self._give_up)
        if chat is not None:
            self._send(chat.head)

    def append(self, text: str) -> None:
        """More of the prompt. Costs the encoding of a few words; waits for nothing.

        Raises:
            RequestError: the prompt was finished, or the text can't be encoded; then it is
                not taken, and the request goes on.
        """
        if self._complete:
            raise RequestError(f"request '{self.id}' is finished; open another for more text")
        self._tokenizer.check_text(text)
        self._timer.cancel()
        self._timer = self._loop.call_later(self._idle_seconds, self._give_up)
        self._typed.append(text)
        self._send(self._trimmed(text))

    def finish(self, whole: str | None = None) -> None:
        """The prompt is complete: it is answered now. Further calls do nothing.

        Args:
            whole: the conversation with what was appended as its last message, where the
                caller has rendered it already (`ChatFrame.render`), as a server does on
                another thread.
        """
        if self._complete:
            return
        self._complete = True
        self._timer.cancel()
        if self._chat is not None:
            if whole is None:
                whole = self._chat.render("".join(self._typed))
            if whole != self._encoder.text + self._chat.tail:  # it looked into the message
                ids = self._tokenizer.encode(whole, add_special_tokens=False)
                self._thread.complete(self.id, ids, anew=True)
                return
            self._send(self._chat.tail)
        self._thread.complete(self.id, self._encoder.finish())

    @property
    def open(self) -> bool:
        """Whether more can be appended."""
        return not self._complete

    def close(self) -> None:
        """As `abort`."""
        self.abort()

    def abort(self) -> None:
        """Ends the request and frees what it holds; its stream ends with the reason ABORT."""
        self._timer.cancel()
        self._complete = True
        if self._unfinished:
            self._thread.abort(self.id)

    async def __aiter__(self) -> AsyncIterator[SequenceDelta]:
        """Deltas as they come, until all sequences have ended; they begin after `finish`.

        Leaving the iteration early aborts the request.

        Raises:
            RequestFailedError: it failed, or nothing was appended for too long.
        """
        try:
            while deltas := await self.ready():
                for delta in deltas:
                    yield delta
        finally:
            self.abort()

    async def __aenter__(self) -> OpenRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def _trimmed(self, text: str) -> str:
        """What a template that trims lets through of it by now."""
        if self._chat is None or not self._chat.trims:
            return text
        text = self._spaces + text
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun = self._begun or bool(shown)
        self._spaces = text[len(shown) :]
        return shown

    def _send(self, text: str) -> None:
        if text and (ids := self._encoder.append(text)):
            self._thread.extend(self.id, ids)

    def _give_up(self) -> None:
        self._failure = (
            f"nothing was appended for {self._idle_seconds:g} seconds and its prompt isn't"
            " finished; call finish() when it is"
        )
        self._complete = True
        self._thread.abort(self.id)
