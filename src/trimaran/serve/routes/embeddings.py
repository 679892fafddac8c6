"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.engine.encoder_core import Vector
from trimaran.engine.encoder_engine import EncoderEngine, EncoderStream
from trimaran.models.tokenizer import Tokenizer
from trimaran.serve import sse
from trimaran.serve.errors import ApiError, timed_out, unsupported
from trimaran.serve.routes import context
from trimaran.serve.schema.embeddings import EmbeddingRequest
from trimaran.serve.service import Service, prompts_of

router = APIRouter()


@router.post("/v1/embeddings", tags=["OpenAI"])
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text, where the model is an encoder."""
    service = context.service(request)
    model = service.check_model(body.model)
    encoder = _encoder(service, body)
    texts = prompts_of(body.input)
    service.admit(1, 1)
    prompts = await service.encode_all(texts, add_special_tokens=body.add_special_tokens)
    longest = _longest(body, encoder)
    if longest is not None:
        prompts = [_cut(ids, longest, body, encoder.core.tokenizer) for ids in prompts]
    name = context.request_id(request, body.request_id)
    with service.encode_texts(prompts, name, priority=body.priority) as streams:
        seconds = service.config.request_timeout
        try:
            async with asyncio.timeout(seconds):
                vectors = await sse.unless_gone(request.receive, _all(streams))
        except TimeoutError:
            raise timed_out(round(seconds)) from None
    tokens = sum(map(len, prompts))
    return context.Json(
        {
            "object": "list",
            "model": model,
            "data": [
                {"object": "embedding", "index": i, "embedding": _shown(vector, body)}
                for i, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _encoder(service: Service, body: EmbeddingRequest) -> EncoderEngine:
    encoder = service.loaded.encoder
    if encoder is None:
        pooling = "" if body.pooling is None else "; pooling its last layer isn't supported yet"
        raise ApiError(
            400,
            f"the model '{service.names[0]}' generates text and makes no embeddings{pooling};"
            " serve an encoder, such as all-MiniLM-L6-v2",
            param="model" if body.pooling is None else "pooling",
            code="model_not_an_encoder",
        )
    own = encoder.core.model
    if body.pooling not in (None, own.pooling):
        raise unsupported("pooling", f"is '{body.pooling}'; this model's is '{own.pooling}'")
    if body.dimensions is not None and body.dimensions > own.hidden_size:
        raise ApiError(
            400,
            f"dimensions is {body.dimensions}; this model's vectors have {own.hidden_size}",
            param="dimensions",
            code="invalid_value",
        )
    return encoder


def _longest(body: EmbeddingRequest, encoder: EncoderEngine) -> int | None:
    """Tokens to which texts are cut; None: they aren't."""
    wanted, most = body.truncate_prompt_tokens, encoder.core.max_model_len
    if wanted is None or wanted == -1:
        return None if wanted is None else most
    around = len(encoder.core.tokenizer.prefix) + len(encoder.core.tokenizer.suffix)
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


async def _all(streams: Sequence[EncoderStream]) -> list[Vector]:
    return await asyncio.gather(*(stream.vector() for stream in streams))


def _shown(vector: Vector, body: EmbeddingRequest) -> str | list[float]:
    if body.dimensions is not None and body.dimensions < len(vector):
        vector = vector[: body.dimensions]
        vector = vector / max(float(np.sqrt(np.dot(vector, vector))), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found
