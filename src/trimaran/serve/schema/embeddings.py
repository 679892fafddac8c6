"""`POST /v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimaran.serve.schema.common import FIRST, Body, Text, TokenId

Ids = Annotated[list[TokenId], FIRST, Field(min_length=1, max_length=1 << 16)]


class EmbeddingRequest(Body):
    """Texts whose vectors are asked for."""

    model: str | None = None
    input: (
        Text
        | Ids
        | Annotated[list[Text], FIRST, Field(min_length=1, max_length=2048)]
        | Annotated[list[Ids], FIRST, Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    add_special_tokens: bool = True
    pooling: str | None = Field(None, max_length=64)
    normalize: bool | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    user: str | None = Field(None, max_length=1024)
