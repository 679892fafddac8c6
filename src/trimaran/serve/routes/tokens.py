"""`POST /tokenize`, `POST /detokenize`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.serve.routes import context
from trimaran.serve.schema.tokens import DetokenizeRequest, TokenizeRequest
from trimaran.serve.service import Service

router = APIRouter(tags=["Tokens"])


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    service = context.service(request)
    service.check_model(body.model)
    async with service.turn(len(await request.body())):
        ids = await _encode(service, body)
        core = service.loaded.either.core

        def answer() -> Response:
            texts = None
            if body.return_token_strs:
                token_bytes = core.tokenizer.token_bytes
                texts = [token_bytes(token).decode("utf-8", "replace") for token in ids]
            return context.Json(
                {
                    "count": len(ids),
                    "max_model_len": core.max_model_len,
                    "tokens": ids,
                    "token_strs": texts,
                }
            )

        return await service.aside(answer, len(ids))


async def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return await service.encode_chat(
            [message.plain() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            **(body.chat_template_kwargs or {}),
        )
    assert body.prompt is not None
    special = body.add_special_tokens is not False
    return await service.encode(body.prompt, add_special_tokens=special)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    service = context.service(request)
    service.check_model(body.model)
    decode = partial(service.loaded.either.core.tokenizer.decode, body.tokens)
    async with service.turn(len(await request.body())):
        return context.Json({"prompt": await service.aside(decode, len(body.tokens))})
