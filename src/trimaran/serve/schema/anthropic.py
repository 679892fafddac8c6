"""`POST /v1/messages`, Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trimaran.core.sampling_params import SamplingParams
from trimaran.serve.errors import unsupported
from trimaran.serve.schema.common import FIRST, Body, Text


class TextBlock(Body):
    """A block of text; the only kind that these models read."""

    type: Literal["text"]
    text: Text
    cache_control: dict[str, Any] | None = None
    citations: None = None


class AnthropicMessage(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[TextBlock], FIRST]

    def plain(self) -> dict[str, Any]:
        """As the chat template takes it."""
        return {"role": self.role, "content": plain_text(self.content)}


class Metadata(Body):
    """About the request."""

    user_id: str | None = Field(None, max_length=1024)


class Thinking(Body):
    """Reasoning before the answer; it can only be off."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class CountRequest(Body):
    """A conversation whose tokens are counted."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=4096, fail_fast=True)
    system: Text | Annotated[list[TextBlock], FIRST] | None = None
    tools: Annotated[list[dict[str, Any]], FIRST] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages, the system's first."""
        system = [] if self.system is None else [_system(plain_text(self.system))]
        return system + [message.plain() for message in self.messages]

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` for what is known and can't be honoured."""
        if self.tools:
            raise unsupported("tools", "tool calling is not supported by this server yet")
        if self.tool_choice not in (None, {"type": "none"}, {"type": "auto"}):
            raise unsupported("tool_choice", "tool calling is not supported by this server yet")
        if self.thinking is not None and self.thinking.type != "disabled":
            raise unsupported("thinking", f"is '{self.thinking.type}'; give 'disabled'")


class MessagesRequest(CountRequest):
    """A conversation to answer."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[list[str], FIRST] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }
        values = {name: value for name, value in given.items() if value is not None}
        return SamplingParams.from_mapping(values | {"max_tokens": self.max_tokens})


def plain_text(content: str | list[TextBlock]) -> str:
    """The text of a content in either form."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
