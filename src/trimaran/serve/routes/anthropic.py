"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.core.request import FinishReason
from trimaran.serve import sse
from trimaran.serve.answers import Usage, merged
from trimaran.serve.routes import context
from trimaran.serve.schema.anthropic import CountRequest, MessagesRequest
from trimaran.serve.service import Job, deltas, outputs

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation; a stream of server-sent events with `stream`."""
    service = context.service(request)
    body.refuse_unsupported()
    model = service.check_model(body.model)
    params = body.sampling()
    service.admit(1, params.n)
    conversation = body.conversation()
    # As with Anthropic, the answer goes on from a last turn of the assistant.
    prompt = await service.encode_chat(
        conversation, continue_final_message=conversation[-1]["role"] == "assistant"
    )
    name = context.request_id(request)
    with ExitStack() as stack:
        job = stack.enter_context(service.start([prompt], params, name))
        if body.stream:
            return sse.EventStream(_events(f"msg_{name}", model, job), stack.pop_all())
        (output,) = await sse.unless_gone(request.receive, outputs(job))
    choice = output.outputs[0]
    usage = Usage.of([output])
    return context.Json(
        _message(f"msg_{name}", model, usage)
        | {"content": [{"type": "text", "text": choice.text}]}
        | _stop(choice.finish_reason, choice.stop_reason)
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """How many tokens a conversation would have as a prompt."""
    service = context.service(request)
    body.refuse_unsupported()
    service.check_model(body.model)
    conversation = body.conversation()
    ids = await service.encode_chat(
        conversation, continue_final_message=conversation[-1]["role"] == "assistant"
    )
    return context.Json({"input_tokens": len(ids)})


async def _events(name: str, model: str, job: Job) -> AsyncIterator[bytes]:
    usage = Usage(job.prompt_tokens)
    begun = False
    try:
        async for _, found in deltas(job):
            for delta in merged(found):
                usage.add(delta)
                if not begun:
                    begun = True
                    yield _event("message_start", message=_message(name, model, usage))
                    block = {"type": "text", "text": ""}
                    yield _event("content_block_start", index=0, content_block=block)
                    yield _event("ping")
                if delta.text:
                    text = {"type": "text_delta", "text": delta.text}
                    yield _event("content_block_delta", index=0, delta=text)
                if delta.finish_reason is not None:
                    yield _event("content_block_stop", index=0)
                    stop = _stop(delta.finish_reason, delta.stop_reason)
                    yield _event("message_delta", delta=stop, usage=_usage(usage))
                    yield _event("message_stop")
    except Exception as error:  # the answer has begun: its status can't be changed
        yield sse.named("error", sse.told(error).anthropic())


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named(kind, {"type": kind, **fields})


def _message(name: str, model: str, usage: Usage) -> dict[str, Any]:
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts tokens from the cache apart."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _stop(reason: FinishReason | None, what: int | str | None) -> dict[str, str | None]:
    if isinstance(what, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": what}
    known = {FinishReason.LENGTH: "max_tokens", FinishReason.STOP: "end_turn"}
    return {"stop_reason": known.get(reason, reason), "stop_sequence": None}  # type: ignore[arg-type]
