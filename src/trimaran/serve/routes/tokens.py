"""`POST /tokenize`, `POST /detokenize`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.serve.routes import context
from trimaran.serve.schema.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter(tags=["Tokens"])


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    service = context.service(request)
    service.check_model(body.model)
    if body.messages is not None:
        ids = await service.encode_chat(
            [message.plain() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            **(body.chat_template_kwargs or {}),
        )
    else:
        assert body.prompt is not None
        special = body.add_special_tokens is not False
        ids = await service.encode(body.prompt, add_special_tokens=special)
    core = service.loaded.either.core
    found: dict[str, object] = {
        "count": len(ids),
        "max_model_len": core.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        token_bytes = core.tokenizer.token_bytes

        def texts() -> list[str]:
            return [token_bytes(token).decode("utf-8", "replace") for token in ids]

        found["token_strs"] = await service.aside(texts, len(ids))
    return context.Json(found)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    service = context.service(request)
    service.check_model(body.model)
    decode = partial(service.loaded.either.core.tokenizer.decode, body.tokens)
    return context.Json({"prompt": await service.aside(decode, len(body.tokens))})
