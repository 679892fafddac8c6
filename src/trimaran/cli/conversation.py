"""The messages of a chat, and the answer that is being given."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from trimaran.cli.records import Ask
from trimaran.cli.running import Running
from trimaran.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimaran.engine.llm import LLM

Message = dict[str, str]

ROOM_FOR_ANSWER = 512
"""Tokens of the context, or a quarter of it where that is less, that an answer can count on."""


class Conversation:
    """Turns of user and assistant, always in pairs, after a system message or none."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._turns: list[Message] = []
        self._running: Running | None = None
        self.system = system

    @property
    def messages(self) -> list[Message]:
        """All of it, the system message first (a copy)."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self._turns

    def reset(self) -> None:
        """Forgets the turns."""
        self._turns.clear()

    def make_room(self, text: str) -> int:
        """Drops the oldest pairs of turns until the next message and an answer fit the
        context; returns how many messages that took."""
        limit = self._llm.max_model_len
        room = limit - min(ROOM_FOR_ANSWER, limit // 4)
        before = len(self._turns)
        while self._turns and self._tokens(text) > room:
            del self._turns[:2]
        return before - len(self._turns)

    def answer(self, text: str) -> Generator[str]:
        """The answer to a message in pieces, as it comes.

        Leaving it early, as Ctrl-C does, ends the request; what was said until then stays in
        the conversation. Where nothing was said the message is taken back.

        Raises:
            RequestError, TemplateError, RequestFailedError: there is no answer.
        """
        ask = Ask(None, 0, [*self.messages, _message("user", text)], self._params, chat=True)
        said: list[str] = []
        try:
            self._running = Running(self._llm, ask)
            for piece in self._running.texts():
                said.append(piece)
                yield piece
        finally:
            if self._running is not None:
                self._running.stop()
            if any(said):
                self._turns += [
                    _message("user", text),
                    _message("assistant", "".join(said)),
                ]

    def rates(self) -> str:
        """Of the last answer, as one line."""
        return "" if self._running is None else self._running.rates()

    def _tokens(self, text: str) -> int:
        prompt = self._llm.render_chat([*self.messages, _message("user", text)])
        return len(self._llm.tokenizer.encode(prompt, add_special_tokens=False))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
