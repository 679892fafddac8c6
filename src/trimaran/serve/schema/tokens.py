"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from trimaran.serve.schema.chat import Message
from trimaran.serve.schema.common import Body, Text, TokenId


class TokenizeRequest(Body):
    """A text or a conversation whose tokens are asked for."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Body):
    """Token ids whose text is asked for."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=1 << 20, fail_fast=True)
