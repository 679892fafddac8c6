"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.core.pooling import POOLINGS
from trimaran.engine.pooling import Vector, normalized
from trimaran.models.tokenizer import Tokenizer
from trimaran.serve import sse
from trimaran.serve.errors import ApiError, timed_out, unsupported
from trimaran.serve.routes import context
from trimaran.serve.schema.embeddings import EmbeddingRequest
from trimaran.serve.service import Service, prompts_of
from trimaran.serve.vectors import encoded, pooled

router = APIRouter()

_LETTERS = 12  # of a number in JSON, about


@router.post("/v1/embeddings", tags=["OpenAI"])
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text: an encoder's, or the pooled rows of a model that generates."""
    service = context.service(request)
    model = service.check_model(body.model)
    pooling = _pooling(service, body)
    core = service.loaded.either.core
    if body.dimensions is not None and body.dimensions > core.model.hidden_size:
        raise ApiError(
            400,
            f"dimensions is {body.dimensions}; this model's vectors have {core.model.hidden_size}",
            param="dimensions",
            code="invalid_value",
        )
    service.admit(1, 1)
    prompts = await service.encode_all(
        prompts_of(body.input), add_special_tokens=body.add_special_tokens
    )
    longest = _longest(body, core.tokenizer, core.max_model_len)
    if longest is not None:
        prompts = [_cut(ids, longest, body, core.tokenizer) for ids in prompts]
    name, seconds = context.request_id(request, body.request_id), service.config.request_timeout
    if service.loaded.encoder is not None:
        work = encoded(service, prompts, name, priority=body.priority)
    else:
        work = pooled(
            service, prompts, pooling, name, priority=body.priority, cache_salt=body.cache_salt
        )
    try:
        async with asyncio.timeout(seconds):
            vectors = await sse.unless_gone(request.receive, work)
    except TimeoutError:
        raise timed_out(round(seconds)) from None
    unit, tokens = _has_length_one(service, body), sum(map(len, prompts))
    numbers = sum(map(len, vectors))
    content = await service.aside(
        lambda: _content(model, [_shown(vector, body, unit) for vector in vectors], tokens),
        numbers * _LETTERS,
    )
    return Response(content, media_type="application/json")


def _content(model: str, shown: Sequence[str | list[float]], tokens: int) -> bytes:
    """The answer, vector by vector: one call for thousands would hold up all other threads."""
    data = ",".join(
        json.dumps({"object": "embedding", "index": i, "embedding": each}, separators=(",", ":"))
        for i, each in enumerate(shown)
    )
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    return (
        f'{{"object":"list","model":{json.dumps(model)},"data":[{data}],"usage":{usage}}}'.encode()
    )


def _pooling(service: Service, body: EmbeddingRequest) -> str:
    """How the texts are pooled.

    Raises:
        ApiError: 400, nobody has said, or not so by this model.
    """
    encoder = service.loaded.encoder
    if encoder is None:
        pooling = body.pooling or service.config.pooling
        if pooling is None:
            raise ApiError(
                400,
                f"the model '{service.names[0]}' generates text and is no encoder; say how to pool"
                " its rows ('pooling': 'mean' or 'last', or the server's --pooling), or serve an"
                " encoder, such as all-MiniLM-L6-v2",
                param="pooling",
                code="model_not_an_encoder",
            )
        if pooling not in POOLINGS:
            known = " or ".join(f"'{each}'" for each in POOLINGS)
            raise unsupported("pooling", f"is '{pooling}'; give {known}")
        return pooling
    own = encoder.core.model
    if body.pooling not in (None, own.pooling):
        raise unsupported("pooling", f"is '{body.pooling}'; this model's is '{own.pooling}'")
    if own.normalize and body.normalize is False:
        raise unsupported("normalize", "is false; this model's vectors always have length 1")
    return own.pooling


def _has_length_one(service: Service, body: EmbeddingRequest) -> bool:
    """Whether vectors are to be given the length 1 (and have it not yet)."""
    if service.loaded.encoder is not None:
        return bool(body.normalize)
    return body.normalize is not False


def _longest(body: EmbeddingRequest, tokenizer: Tokenizer, most: int) -> int | None:
    """Tokens to which texts are cut; None: they aren't."""
    wanted = body.truncate_prompt_tokens
    if wanted is None or wanted == -1:
        return None if wanted is None else most
    around = len(tokenizer.prefix) + len(tokenizer.suffix)
    if not around < wanted <= most:
        raise ApiError(
            400,
            f"truncate_prompt_tokens is {wanted}; give {around + 1} to {most}, or -1 for the most",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    return wanted


def _cut(ids: list[int], longest: int, body: EmbeddingRequest, tokenizer: Tokenizer) -> list[int]:
    """The beginning of a text, with the tokens that the model wants after it."""
    suffix = list(tokenizer.suffix) if body.add_special_tokens else []
    if len(ids) <= longest or not suffix or ids[-len(suffix) :] != suffix:
        return ids[:longest]
    return ids[: longest - len(suffix)] + suffix


def _shown(vector: Vector, body: EmbeddingRequest, unit: bool) -> str | list[float]:
    if body.dimensions is not None and body.dimensions < len(vector):
        vector = vector[: body.dimensions]
        unit = unit or body.normalize is not False
    if unit:
        vector = normalized(vector)
    if body.encoding_format == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found
