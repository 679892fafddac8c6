"""A user's message computed while it is typed, for a `/v1/realtime` session.

It is only ahead of time: the session keeps the text, and where this can't be had, or the
conversation has changed meanwhile, the whole conversation is sent once it is complete; what
was computed is then found in the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trimaran.core.errors import TrimaranError
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.chat_frame import ChatFrame
from trimaran.engine.open_request import OpenRequest
from trimaran.serve.errors import ApiError
from trimaran.serve.service import LONG_TEXT, Job, Service

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is made of besides its messages."""

    params: SamplingParams
    priority: int
    cache_salt: str

    def options(self) -> dict[str, Any]:
        """As `Service.start` and `Service.open` take them."""
        return {"priority": self.priority, "cache_salt": self.cache_salt}


class TypedPrompt:
    """The open request of a message, at most one at a time."""

    def __init__(self, service: Service, name: str) -> None:
        self._service = service
        self._name = name
        self._stack = ExitStack()
        self._opened: tuple[Job, OpenRequest, ChatFrame] | None = None
        self._before: list[Message] = []
        self._text = ""
        self._terms: Terms | None = None

    async def typed(self, before: list[Message], text: str, terms: Terms) -> None:
        """The message after these is `text` by now; what is new of it goes to the engine."""
        if self._fits(before, terms) and text.startswith(self._text):
            assert self._opened is not None
            new = text[len(self._text) :]
            if len(text) <= LONG_TEXT:
                self._text = text
                self._opened[1].append(new)
                return
        self.close()
        size = len(text) + sum(len(message["content"]) for message in before)
        template = self._service.loaded.template
        if template is None or size > LONG_TEXT:  # rendered and encoded on another thread, later
            return
        try:
            messages = [*before, {"role": "user", "content": ""}]
            frame = await asyncio.to_thread(ChatFrame, template, messages)
            job, opened = self._stack.enter_context(
                self._service.open(frame, terms.params, self._name, **terms.options())
            )
        except (ApiError, TrimaranError):  # no room, or no such template: it is told at the end
            return
        self._opened = (job, opened, frame)
        self._before, self._text, self._terms = list(before), text, terms
        opened.append(text)

    async def take(self, messages: Sequence[Message], terms: Terms) -> tuple[Job, ExitStack] | None:
        """The job that answers these messages, if their last one is what was typed; whoever
        takes it closes the stack."""
        *before, last = messages
        if last != {"role": "user", "content": self._text} or not self._fits(before, terms):
            self.close()
            return None
        assert self._opened is not None
        job, opened, frame = self._opened
        whole = await asyncio.to_thread(frame.render, self._text)
        if not opened.open:  # it has just been given up
            self.close()
            return None
        self._service.complete(job, opened, whole)
        self._opened = None
        return job, self._stack.pop_all()

    def close(self) -> None:
        """Gives up what is open."""
        self._opened = None
        self._stack.close()

    def _fits(self, before: list[Message], terms: Terms) -> bool:
        if self._opened is None:
            return False
        loop = asyncio.get_running_loop()
        job, opened, _ = self._opened
        in_time = loop.time() < job.deadline
        return in_time and opened.open and (self._before, self._terms) == (before, terms)
