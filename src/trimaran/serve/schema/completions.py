"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trimaran.serve.errors import unsupported
from trimaran.serve.schema.common import Sampling, StreamOptions, Text, TokenId, Wishes

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(Sampling, Wishes):
    """A text to continue, or several."""

    model: str | None = None
    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=2048, fail_fast=True)]
    )
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=128)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=256)
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool = True

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` for what is known and can't be honoured."""
        if self.suffix:
            raise unsupported("suffix", "filling in the middle is not supported")
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "must equal n: no choices are thrown away here")
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "goes only with stream=true")
        if self.max_tokens == 0 and not self.echo:
            raise unsupported("max_tokens", "is 0, which goes only with echo=true")
