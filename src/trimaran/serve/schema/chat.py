"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from trimaran.serve.errors import unsupported
from trimaran.serve.schema.common import FIRST, Body, Sampling, StreamOptions, Text, Wishes, at_most


class TextPart(Body):
    """A part of a message's content; text is the only kind that these models read."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a conversation; further fields are handed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: Text | Annotated[list[TextPart], FIRST] | None = None

    def plain(self) -> dict[str, Any]:
        """As the chat template takes it."""
        return self.model_dump(exclude_unset=True)


class ResponseFormat(Body):
    """How the answer is to look; only plain text can be promised."""

    type: str


class ChatRequest(Sampling, Wishes):
    """A conversation to answer."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], FIRST] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[str], FIRST] | None = None
    store: bool | None = None
    service_tier: str | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` for what is known and can't be honoured."""
        if self.tools:
            raise unsupported("tools", "tool calling is not supported by this server yet")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "tool calling is not supported by this server yet")
        if self.response_format is not None and self.response_format.type != "text":
            raise unsupported(
                "response_format", f"is '{self.response_format.type}'; only 'text' is supported"
            )
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", "only ['text'] is supported")
        if self.store:
            raise unsupported("store", "this server keeps no answers; leave it out")
        if self.service_tier not in (None, "auto", "default"):
            raise unsupported("service_tier", f"is '{self.service_tier}'; give 'auto'")
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "goes only with stream=true")
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "goes only with logprobs=true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise unsupported(
                "continue_final_message", "goes only with a last message of the assistant"
            )
        for name in (self.chat_template_kwargs or {}).keys() & _TEMPLATE_OWN:
            raise unsupported(f"chat_template_kwargs.{name}", "is set by the server")


_TEMPLATE_OWN = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
