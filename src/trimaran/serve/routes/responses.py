"""`POST /v1/responses`: text, without state kept between requests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.core.request import FinishReason
from trimaran.serve import sse
from trimaran.serve.answers import Usage, chat_logprobs, merged
from trimaran.serve.errors import unsupported
from trimaran.serve.routes import context
from trimaran.serve.schema.responses import ResponsesRequest
from trimaran.serve.service import Job, deltas, outputs

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answers a text or a conversation; a stream of server-sent events with `stream`."""
    service = context.service(request)
    body.refuse_unsupported()
    model = service.check_model(body.model)
    if (body.top_logprobs or 0) > service.config.max_logprobs:
        raise unsupported(
            "top_logprobs", f"is above this server's limit of {service.config.max_logprobs}"
        )
    params = body.sampling()
    service.admit(1, params.n)
    prompt = await service.encode_chat(body.messages())
    name = context.request_id(request)
    with ExitStack() as stack:
        job = stack.enter_context(service.start([prompt], params, name))
        answer = _Answer(name, model, body, job)
        if body.stream:
            return sse.EventStream(answer.events(), stack.pop_all())
        (output,) = await sse.unless_gone(request.receive, outputs(job))
    choice = output.outputs[0]
    answer.usage = Usage.of([output])
    answer.text = choice.text
    answer.reason = choice.finish_reason
    if choice.logprobs is not None:
        answer.logprobs = _logprobs(choice.token_ids, choice.logprobs, body)
    return context.Json(answer.response())


class _Answer:
    """An answer as it grows, and the objects that tell of it."""

    def __init__(self, name: str, model: str, body: ResponsesRequest, job: Job) -> None:
        self._name = name
        self._model = model
        self._body = body
        self._job = job
        self._created = context.now()
        self._numbers = itertools.count()
        self.usage = Usage(job.prompt_tokens)
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.reason: FinishReason | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())
        yield self._event("response.output_item.added", output_index=0, item=self._item())
        yield self._event("response.content_part.added", **self._at(), part=_part("", []))
        try:
            async for _, found in deltas(self._job):
                for delta in merged(found):
                    self.usage.add(delta)
                    self.reason = delta.finish_reason or self.reason
                    own: list[dict[str, Any]] = []
                    if delta.logprobs is not None:
                        own = _logprobs(delta.token_ids, delta.logprobs, self._body)
                        self.logprobs += own
                    if delta.text or own:
                        self.text += delta.text
                        yield self._event(
                            "response.output_text.delta",
                            **self._at(),
                            delta=delta.text,
                            logprobs=own,
                        )
        except Exception as error:  # the answer has begun: its status can't be changed
            told = sse.told(error)
            yield self._event("error", code=told.code, message=told.message, param=told.param)
            return
        yield self._event(
            "response.output_text.done", **self._at(), text=self.text, logprobs=self.logprobs
        )
        part = _part(self.text, self.logprobs)
        yield self._event("response.content_part.done", **self._at(), part=part)
        yield self._event("response.output_item.done", output_index=0, item=self._item())
        response = self.response()
        yield self._event(f"response.{response['status']}", response=response)

    def response(self) -> dict[str, Any]:
        """The answer's object, as far as it goes."""
        body = self._body
        ended = self.reason is not None
        cut = self.reason is FinishReason.LENGTH
        usage = {
            "input_tokens": self.usage.prompt,
            "input_tokens_details": {"cached_tokens": self.usage.cached},
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage.prompt + self.usage.completion,
        }
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": self._status(),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [self._item()] if ended else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self._job.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._job.params.top_p,
            "truncation": "disabled",
            "usage": usage if ended else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _status(self) -> str:
        if self.reason is None:
            return "in_progress"
        return "incomplete" if self.reason is not FinishReason.STOP else "completed"

    def _item(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "status": self._status(),
            "content": [_part(self.text, self.logprobs)] if self.reason is not None else [],
        }

    def _at(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._name}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse.named(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(
    tokens: list[int], entries: list[Any], body: ResponsesRequest
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat_logprobs(tokens, entries, body.top_logprobs or 0)["content"]
    return found
