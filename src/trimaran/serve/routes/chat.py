"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.core.outputs import RequestOutput, SequenceDelta
from trimaran.core.sampling_params import SamplingParams
from trimaran.serve import sse
from trimaran.serve.answers import Usage, chat_logprobs, merged, prompt_logprobs
from trimaran.serve.errors import unsupported
from trimaran.serve.routes import context
from trimaran.serve.schema.chat import ChatRequest
from trimaran.serve.service import Job, Service, deltas, outputs

router = APIRouter()


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation; a stream of server-sent events with `stream`."""
    service = context.service(request)
    body.refuse_unsupported()
    model = service.check_model(body.model)
    params = _params(body, service)
    service.admit(1, params.n)
    prompt = await service.encode_chat(
        [message.plain() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **(body.chat_template_kwargs or {}),
    )
    name = context.request_id(request, body.request_id)
    with ExitStack() as stack:
        job = stack.enter_context(
            service.start(
                [prompt],
                params,
                name,
                priority=body.priority,
                cache_salt=body.cache_salt,
                **body.wishes(),
            )
        )
        answer = _Answer(f"chatcmpl-{name}", model, body, job)
        if body.stream:
            return sse.EventStream(answer.events(), stack.pop_all())
        (output,) = await sse.unless_gone(request.receive, outputs(job))
        return context.Json(answer.whole(output))


def _params(body: ChatRequest, service: Service) -> SamplingParams:
    top = body.top_logprobs or 0
    if top > service.config.max_logprobs:
        raise unsupported(
            "top_logprobs", f"is {top}; this server gives {service.config.max_logprobs} at most"
        )
    return body.sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=top if body.logprobs else None,
    )


class _Answer:
    """Turns what the engine gives into OpenAI's objects."""

    def __init__(self, name: str, model: str, body: ChatRequest, job: Job) -> None:
        self._body = body
        self._job = job
        self._created = context.now()
        self._name = name
        self._model = model
        self._echo = _echoed(body)
        options = body.stream_options
        self._usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats

    # ------------------------------------------------------------------ whole

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The object of an answer that isn't streamed."""
        top = self._body.top_logprobs or 0
        choices = [
            {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": self._echo + choice.text,
                    "refusal": None,
                },
                "logprobs": None
                if choice.logprobs is None
                else chat_logprobs(choice.token_ids, choice.logprobs, top),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ]
        found = self._head("chat.completion") | {
            "choices": choices,
            "usage": Usage.of([output]).openai(),
        }
        if output.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return found

    # ------------------------------------------------------------------ streamed

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        usage = Usage(self._job.prompt_tokens)
        try:
            for index in range(self._job.params.n):
                start = {"role": "assistant", "content": self._echo}
                yield self._chunk(index, start, usage)
            async for _, found in deltas(self._job):
                for delta in merged(found):
                    usage.add(delta)
                    if event := self._event(delta, usage):
                        yield event
            if self._usage:
                yield sse.data(
                    self._head("chat.completion.chunk") | {"choices": [], "usage": usage.openai()}
                )
        except Exception as error:  # the answer has begun: its status can't be changed
            yield sse.error_event(error)
        yield sse.DONE

    def _event(self, delta: SequenceDelta, usage: Usage) -> bytes:
        """A chunk, or nothing where there is nothing to tell yet."""
        if delta.logprobs is None and delta.finish_reason is None and not self._continuous:
            return self._text(delta.index, delta.text) if delta.text else b""
        content = {"content": delta.text} if delta.text or delta.logprobs else {}
        logprobs = (
            None
            if delta.logprobs is None
            else chat_logprobs(delta.token_ids, delta.logprobs, self._body.top_logprobs or 0)
        )
        return self._chunk(
            delta.index, content, usage, logprobs, delta.finish_reason, delta.stop_reason
        )

    def _text(self, index: int, text: str) -> bytes:
        """The usual chunk, of which only the text is new."""
        if not hasattr(self, "_ends"):
            mark = "\x00"
            whole = self._chunk(0, {"content": mark}, None).decode()
            head, tail = whole.split(json.dumps(mark))
            before, after = head.split('"index":0', 1)
            self._ends = (before + '"index":', after, tail)
        before, after, tail = self._ends
        return f"{before}{index}{after}{json.dumps(text)}{tail}".encode()

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        usage: Usage | None,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        chunk = self._head("chat.completion.chunk") | {"choices": [choice]}
        if self._usage:
            chunk["usage"] = usage.openai() if self._continuous and usage else None
        return sse.data(chunk)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }


def _echoed(body: ChatRequest) -> str:
    """With `echo`, the text of a last message of the assistant that is continued."""
    if not (body.echo and body.continue_final_message):
        return ""
    content = body.messages[-1].content
    return content if isinstance(content, str) else "".join(part.text for part in content or [])
