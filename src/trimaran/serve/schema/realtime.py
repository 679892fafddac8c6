"""Events that a client sends in a `/v1/realtime` session: OpenAI's for text, and
`input_text_buffer.*`, which are for text what `input_audio_buffer.*` are for speech."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trimaran.core.sampling_params import SamplingParams
from trimaran.serve.errors import unsupported
from trimaran.serve.schema.common import FIRST, Body, Sampling, Text, at_most

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
OutputTokens = Literal["inf"] | Annotated[int, Field(ge=1, lt=2**31)]


class Generating(Sampling):
    """How answers are made; what isn't given stays as it was."""

    instructions: Text | None = None
    output_modalities: Annotated[list[str], FIRST] | None = None
    modalities: Annotated[list[str], FIRST] | None = None
    max_output_tokens: OutputTokens | None = None
    max_response_output_tokens: OutputTokens | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None

    def refuse_unsupported(self, where: str) -> None:
        """Raises `ApiError` for what is known and can't be honoured; `where` is the field that
        holds this."""
        if self.tools:
            raise unsupported(f"{where}.tools", "tool calling is not supported by this server yet")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported(f"{where}.tool_choice", "tool calling is not supported yet")
        for name in ("output_modalities", "modalities"):
            if getattr(self, name) not in (None, ["text"]):
                raise unsupported(f"{where}.{name}", "only ['text'] is supported")
        if self.audio:
            raise unsupported(f"{where}.audio", "only text is supported")
        if self.n not in (None, 1):
            raise unsupported(f"{where}.n", "a session gives one answer at a time; leave it out")
        if self.prompt_logprobs is not None:
            raise unsupported(f"{where}.prompt_logprobs", "can't be had here; use /v1/completions")
        if self.request_id is not None:
            raise unsupported(f"{where}.request_id", "responses have ids of their own")
        if self.max_output_tokens is not None and self.max_response_output_tokens is not None:
            raise unsupported(
                f"{where}.max_response_output_tokens", "is the old name of max_output_tokens"
            )

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most; None: as many as fit."""
        limit = self.max_output_tokens or self.max_response_output_tokens
        return None if limit == "inf" else limit

    def params(self) -> SamplingParams:
        """Raises ParameterError, naming the field at fault."""
        return self.sampling(max_tokens=self.limit)


class SessionFields(Generating):
    """A session's configuration."""

    type: Literal["realtime"] = "realtime"
    model: str | None = None
    turn_detection: dict[str, Any] | None = None

    def refuse_unsupported(self, where: str) -> None:
        """Also what only a session has."""
        super().refuse_unsupported(where)
        if self.turn_detection:
            raise unsupported(f"{where}.turn_detection", "there is no speech; leave it out")


class ResponseFields(Generating):
    """What differs for one answer from the session's configuration."""

    conversation: Literal["auto", "none"] = "auto"
    metadata: Annotated[dict[str, str], at_most(16)] | None = None


class Part(Body):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class Item(Body):
    """A message of the conversation."""

    id: Name | None = None
    object: Literal["realtime.item"] | None = None
    type: Literal["message"]
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Part], FIRST] = Field(min_length=1, max_length=256)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ClientEvent(Body):
    """What all events have."""

    event_id: str | None = Field(None, max_length=512)
    type: str


class SessionUpdate(ClientEvent):
    """`session.update`."""

    session: SessionFields


class ItemCreate(ClientEvent):
    """`conversation.item.create`."""

    previous_item_id: Name | None = None
    item: Item


class ItemDelete(ClientEvent):
    """`conversation.item.delete` and `conversation.item.retrieve`."""

    item_id: Name


class TextAppend(ClientEvent):
    """`input_text_buffer.append`."""

    text: Text


class TextEnd(ClientEvent):
    """`input_text_buffer.commit` and `input_text_buffer.clear`."""


class ResponseCreate(ClientEvent):
    """`response.create`."""

    response: ResponseFields | None = None


class ResponseCancel(ClientEvent):
    """`response.cancel`."""

    response_id: Name | None = None
