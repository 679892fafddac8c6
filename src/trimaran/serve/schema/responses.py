"""`POST /v1/responses`: text, without state kept between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trimaran.core.sampling_params import SamplingParams
from trimaran.serve.errors import unsupported
from trimaran.serve.schema.common import FIRST, Body, Text, at_most


class Part(Body):
    """A part of an item's content: text the caller wrote, or an answer given back."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Body):
    """A message; an answer's own `output` items can be given back as they came."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], FIRST]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def plain(self) -> dict[str, Any]:
        """As the chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class Format(Body):
    """How the text is to look."""

    type: str


class TextOptions(Body):
    """Of the answer's text."""

    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(Body):
    """What to answer."""

    model: str | None = None
    input: Text | Annotated[list[Item], FIRST]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=128)
    include: Annotated[list[str], FIRST] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], FIRST] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    service_tier: str | None = None
    user: str | None = Field(None, max_length=1024)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation."""
        first = [] if not self.instructions else [_message("system", self.instructions)]
        if isinstance(self.input, str):
            return [*first, _message("user", self.input)]
        return first + [item.plain() for item in self.input]

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or [])

    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        given = {"temperature": self.temperature, "top_p": self.top_p}
        values = {name: value for name, value in given.items() if value is not None}
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return SamplingParams.from_mapping(
            values | {"max_tokens": self.max_output_tokens, "logprobs": logprobs}
        )

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` for what is known and can't be honoured."""
        if not self.messages():
            raise unsupported("input", "is empty; give a text or at least one message")
        if self.tools:
            raise unsupported("tools", "tool calling is not supported by this server yet")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "tool calling is not supported by this server yet")
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise unsupported(name, "this server keeps no answers; send the whole input")
        if self.store:
            raise unsupported("store", "this server keeps no answers; give false or leave it out")
        if self.background:
            raise unsupported("background", "answers are given at once; leave it out")
        if self.reasoning and any(value is not None for value in self.reasoning.values()):
            raise unsupported("reasoning", "can't be steered here; leave it out")
        if self.truncation == "auto":
            raise unsupported("truncation", "is 'auto'; only 'disabled' is supported")
        if self.text and self.text.format and self.text.format.type != "text":
            raise unsupported("text.format", f"is '{self.text.format.type}'; give 'text'")
        if self.text and self.text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity", "can't be steered here; leave it out")
        if self.service_tier not in (None, "auto", "default"):
            raise unsupported("service_tier", f"is '{self.service_tier}'; give 'auto'")
        unknown = set(self.include or []) - {"message.output_text.logprobs"}
        if unknown:
            raise unsupported("include", f"can't include {', '.join(sorted(unknown))}")
        if self.top_logprobs and not self.wants_logprobs:
            raise unsupported(
                "top_logprobs", "goes only with include=['message.output_text.logprobs']"
            )
        if set(self.stream_options or {}) - {"include_obfuscation"}:
            raise unsupported("stream_options", "only include_obfuscation is known")
        if (self.stream_options or {}).get("include_obfuscation"):
            raise unsupported("stream_options.include_obfuscation", "isn't done here; give false")


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
