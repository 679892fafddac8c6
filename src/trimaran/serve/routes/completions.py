"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran.core.outputs import CompletionOutput, Logprobs, RequestOutput, SequenceDelta
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.prompt import prompt_text
from trimaran.serve import sse
from trimaran.serve.answers import Usage, merged, prompt_logprobs, text_logprobs
from trimaran.serve.errors import unsupported
from trimaran.serve.routes import context
from trimaran.serve.schema.completions import CompletionRequest
from trimaran.serve.service import Job, Service, deltas, outputs, prompts_of

router = APIRouter()


@router.post("/v1/completions", tags=["OpenAI"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues a text or several; a stream of server-sent events with `stream`."""
    service = context.service(request)
    body.refuse_unsupported()
    model = service.check_model(body.model)
    params = _params(body, service)
    given = prompts_of(body.prompt)
    service.admit(len(given), params.n)
    prompts = await service.encode_all(given, add_special_tokens=body.add_special_tokens)
    name = context.request_id(request, body.request_id)
    with ExitStack() as stack:
        job = stack.enter_context(
            service.start(
                prompts,
                params,
                name,
                texts=[prompt_text(prompt) for prompt in given],
                priority=body.priority,
                cache_salt=body.cache_salt,
                **body.wishes(),
            )
        )
        answer = _Answer(f"cmpl-{name}", model, body, job, service)
        if body.stream:
            return sse.EventStream(answer.events(), stack.pop_all())
        found = await sse.unless_gone(request.receive, outputs(job))
        return context.Json(answer.whole(found))


def _params(body: CompletionRequest, service: Service) -> SamplingParams:
    top = body.logprobs
    if (top or 0) > service.config.max_logprobs:
        raise unsupported(
            "logprobs", f"is {top}; this server gives {service.config.max_logprobs} at most"
        )
    echoed = top if body.echo else None
    asked = body.prompt_logprobs
    return body.sampling(
        max_tokens=body.max_tokens or (1 if body.max_tokens == 0 else None),
        logprobs=top,
        **({"prompt_logprobs": max(echoed, asked or 0)} if echoed is not None else {}),
    )


class _Answer:
    """Turns what the engine gives into OpenAI's objects."""

    def __init__(
        self, name: str, model: str, body: CompletionRequest, job: Job, service: Service
    ) -> None:
        self._name = name
        self._model = model
        self._body = body
        self._job = job
        self._decode = service.engine.core.tokenizer.decode
        self._created = context.now()
        self._scored_only = body.max_tokens == 0  # one token is drawn and thrown away

    # ------------------------------------------------------------------ whole

    def whole(self, found: Sequence[RequestOutput]) -> dict[str, Any]:
        """The object of an answer that isn't streamed."""
        usage = Usage.of(found)
        if self._scored_only:
            usage.completion = 0
        choices = [
            self._choice(i * self._job.params.n + choice.index, output, choice)
            for i, output in enumerate(found)
            for choice in output.outputs
        ]
        return self._head() | {"choices": choices, "usage": usage.openai()}

    def _choice(
        self, index: int, output: RequestOutput, choice: CompletionOutput
    ) -> dict[str, Any]:
        text, tokens = choice.text, choice.token_ids
        entries: list[Logprobs | None] = list(choice.logprobs or [])
        if self._scored_only:
            text, tokens, entries = "", [], []
        before = ""
        if self._body.echo:
            before = self._prompt(output)
            if output.prompt_logprobs is not None:
                entries = [*output.prompt_logprobs, *entries]
                tokens = [*output.prompt_token_ids, *tokens]
        found: dict[str, Any] = {
            "index": index,
            "text": before + text,
            "logprobs": None
            if self._body.logprobs is None
            else text_logprobs(tokens, entries, self._body.logprobs, 0),
            "finish_reason": "length" if self._scored_only else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return found

    def _prompt(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._decode(output.prompt_token_ids)

    # ------------------------------------------------------------------ streamed

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        body, job = self._body, self._job
        options = body.stream_options
        usage = Usage(job.prompt_tokens)
        offsets: dict[int, int] = {}
        try:
            async for i, found in deltas(job):
                for delta in merged(found):
                    usage.add(delta)
                    index = i * job.params.n + delta.index
                    if (event := self._event(i, index, delta, offsets)) is not None:
                        if options is not None and options.include_usage:
                            event["usage"] = (
                                usage.openai() if options.continuous_usage_stats else None
                            )
                        yield sse.data(event)
            if options is not None and options.include_usage:
                if self._scored_only:
                    usage.completion = 0
                yield sse.data(self._head() | {"choices": [], "usage": usage.openai()})
        except Exception as error:  # the answer has begun: its status can't be changed
            yield sse.error_event(error)
        yield sse.DONE

    def _event(
        self, i: int, index: int, delta: SequenceDelta, offsets: dict[int, int]
    ) -> dict[str, Any] | None:
        """A chunk, or nothing where there is nothing to tell yet."""
        text, tokens = delta.text, list(delta.token_ids)
        entries: list[Logprobs | None] = list(delta.logprobs or [])
        if self._scored_only:
            text, tokens, entries = "", [], []
        if self._body.echo and index not in offsets:
            own = self._job.texts[i]
            text = (own if own is not None else self._decode(self._job.prompts[i])) + text
            if delta.prompt_logprobs is not None:
                entries = [*delta.prompt_logprobs, *entries]
                tokens = [*self._job.prompts[i], *tokens]
        if not text and not entries and delta.finish_reason is None:
            return None
        offset = offsets.get(index, 0)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = text_logprobs(tokens, entries, self._body.logprobs, offset)
        offsets[index] = offset + len(text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._scored_only else delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._head() | {"choices": [choice]}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }
