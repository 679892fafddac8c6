"""`LLM`: a model for offline use, familiar to a user of vLLM."""

from __future__ import annotations

import copy
import itertools
import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimaran.cache.inspection import CacheReport
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BusyError, ParameterError, TemplateError
from trimaran.core.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    SequenceDelta,
)
from trimaran.core.request import Request
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import STANDARD, SloClass, slo_class
from trimaran.engine.collector import OutputCollector
from trimaran.engine.delta_stream import DeltaStream
from trimaran.engine.factory import Phases, load_engine
from trimaran.engine.health import EngineHealth
from trimaran.engine.objective import Objective
from trimaran.engine.pooling import NO_TOKENS, normalized
from trimaran.engine.prompt import Prompt, prompt_ids, prompt_text
from trimaran.engine.thread import EngineThread, Sink
from trimaran.models.store import DEFAULT_MODEL
from trimaran.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A chat message: {"role": …, "content": …}."""

Slo = str | SloClass
"""An SLO class, or its name."""

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""


class LLM:
    """A model, loaded; generates for one prompt or for thousands.

    Example:
        >>> with LLM("smollm2-135m") as llm:
        ...     print(llm.generate("The capital of France is")[0].text)

    Safe to use from several threads; their requests share the batch.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        phases: Phases | None = None,
        download_progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model: a .gguf file, a folder with config.json and safetensors, the folder of a
                build, a known name ("smollm2-135m"), or a hub name ("owner/name").
            phases: collects how long each phase of the start-up took.
            download_progress: called with (bytes so far, bytes in all) of a download.
            **options: fields of `EngineConfig`; an unknown one is refused by name.

        Raises:
            ConfigError, ModelNotFoundError, DownloadError, CheckpointError, BuildError,
            CapacityError, BackendError: each says what to do.
        """
        config = EngineConfig.from_mapping(options)
        loaded = load_engine(model, config, phases=phases, progress=download_progress)
        self._core = loaded.core
        self._template = loaded.chat_template
        self._thread = EngineThread(loaded.core)
        self._ids = itertools.count()
        self.path = loaded.path
        self.config = config

    # ------------------------------------------------------------------ what it is

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._core.max_model_len

    def describe(self) -> dict[str, Any]:
        """Back end, instruction set, threads, weight and KV types: plain JSON values."""
        return self._core.backend.describe()

    def health(self) -> EngineHealth:
        """Whether requests are taken, and if not, why."""
        return self._thread.health()

    def objective(self) -> Objective:
        """What all requests that were answered so far cost, by SLO class (a copy)."""
        return copy.deepcopy(self._core.metrics.objective)

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        slo: Slo | Sequence[Slo] = STANDARD,
        progress: Progress | None = None,
        cache_salt: str = "",
        retention: Retention | None = None,
    ) -> list[RequestOutput]:
        """Answers of all prompts, in their order.

        Args:
            prompts: text, token ids, or a list of either.
            sampling_params: for all prompts, or one each.
            cache_salt: prefixes are shared only between requests of equal salt.
            retention: how long the prompts are to stay cached afterwards.
            priority: for all prompts, or one each; the smallest first with order "priority".
            slo: the class or its name ("interactive", "standard", "batch"), for all prompts or
                one each; what it costs is in the metrics of each answer.

        Raises:
            RequestError: a prompt can never be served; none has been started then.
            RequestFailedError: a request failed while running; the others were aborted.
            BusyError: other callers' requests wait already, as many as may. Prompts of one
                call wait for each other, however many they are.
        """
        many = _as_list(prompts)
        params = _params_list(sampling_params, len(many))
        requests = [
            self._request(prompt_ids(prompt, self.tokenizer), own, cache_salt, retention, *wish)
            for prompt, own, wish in zip(many, params, _wishes(priority, slo, many), strict=True)
        ]
        texts = [prompt_text(prompt) for prompt in many]
        return self._run(requests, texts, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        slo: Slo | Sequence[Slo] = STANDARD,
        progress: Progress | None = None,
        cache_salt: str = "",
        retention: Retention | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them, through the chat template; the
        arguments as of `generate`.

        Raises:
            TemplateError: the model has no chat template, or it refused the messages.
        """
        conversations = _conversations(messages)
        params = _params_list(sampling_params, len(conversations))
        texts = [self.render_chat(conversation) for conversation in conversations]
        requests = [
            self._request(self._chat_ids(text), own, cache_salt, retention, *wish)
            for text, own, wish in zip(texts, params, _wishes(priority, slo, texts), strict=True)
        ]
        return self._run(requests, list(texts), progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        priority: int | Sequence[int] = 0,
        slo: Slo | Sequence[Slo] = STANDARD,
        progress: Progress | None = None,
        cache_salt: str = "",
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each prompt, in their order: of the model's rows after its final norm.

        Every token is computed, cached or not. A vector is bit for bit the same whatever else
        runs. The other arguments are as of `generate`.

        Args:
            pooling: "mean" of a prompt's rows, or the "last" one.
            normalize: give vectors the length 1.

        Raises:
            RequestError: a prompt can never be served; none has been started then.
            RequestFailedError, BusyError: as `generate`.
        """
        many = _as_list(prompts)
        requests = [
            self._request(prompt_ids(prompt, self.tokenizer), NO_TOKENS, cache_salt, None, *wish)
            for prompt, wish in zip(many, _wishes(priority, slo, many), strict=True)
        ]
        for request in requests:
            request.pooling = pooling
        texts = [prompt_text(prompt) for prompt in many]
        found = []
        for output in self._run(requests, texts, progress):
            assert output.vector is not None
            vector = normalized(output.vector) if normalize else output.vector
            found.append(
                EmbeddingRequestOutput(
                    output.request_id,
                    EmbeddingOutput(vector),
                    output.prompt_token_ids,
                    output.metrics,
                )
            )
        return found

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        slo: Slo = STANDARD,
    ) -> Iterator[SequenceDelta]:
        """Deltas of one prompt's answer as they come; leaving the iteration early aborts it."""
        ids = prompt_ids(prompt, self.tokenizer)
        params = sampling_params or SamplingParams()
        return self._stream(self._request(ids, params, priority=priority, slo=slo))

    def start(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        slo: Slo = STANDARD,
    ) -> DeltaStream:
        """Hands a prompt in at once, for deltas that are read later; `stream` hands it in when
        its first delta is asked for."""
        ids = prompt_ids(prompt, self.tokenizer)
        params = sampling_params or SamplingParams()
        return DeltaStream(self._thread, self._request(ids, params, priority=priority, slo=slo))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[SequenceDelta]:
        """`stream` for a conversation."""
        ids = self._chat_ids(self.render_chat(messages))
        return self._stream(self._request(ids, sampling_params or SamplingParams()))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt text of a conversation, ready for the assistant's turn."""
        if self._template is None:
            raise TemplateError(
                f"the model at '{self.path}' has no chat template; use generate() with a prompt"
            )
        return self._template.render(list(messages), add_generation_prompt=True)

    # ------------------------------------------------------------------ life

    def step_cost(self) -> tuple[float, float, float, float, float]:
        """What the engine has learnt of its steps: seconds a step, a row of a decode, a token of
        a prompt, a position a decode attends to, and a pair of a prompt's (see `cost_model`)."""
        return self._thread.ask(lambda core: core.scheduler.cost.coefficients).result()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that no request holds."""
        self._thread.call(lambda core: core.scheduler.kv.reset_prefix_cache())

    def inspect_prefix_cache(self, top: int = 10) -> CacheReport:
        """What the prefix cache holds, by salt, with the `top` hottest prefixes. Taken between
        two steps; holds the next one up for about a second for each million of blocks.

        Raises:
            EngineClosedError: the engine has ended.
        """
        return self._thread.ask(lambda core: core.scheduler.kv.inspect(top)).result()

    def close(self) -> None:
        """Ends every request and frees the model; may be called twice."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)  # missing where loading failed
        if thread is not None:
            thread.close()

    # ------------------------------------------------------------------ inside

    def _chat_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template wrote them

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        retention: Retention | None = None,
        priority: int = 0,
        slo: Slo = STANDARD,
    ) -> Request:
        return Request(
            id=f"llm-{next(self._ids)}",
            prompt=ids,
            params=params,
            arrival=self._core.clock.now(),
            cache_salt=cache_salt,
            retention=retention,
            priority=priority,
            slo=slo_class(slo),
        )

    def _run(
        self, requests: list[Request], texts: Sequence[str | None], progress: Progress | None
    ) -> list[RequestOutput]:
        for request in requests:
            self._core.check(request)
        inbox: queue.SimpleQueue[list[SequenceDelta]] = queue.SimpleQueue()
        collectors = {
            request.id: OutputCollector(request.id, text, request.prompt, request.params.n)
            for request, text in zip(requests, texts, strict=True)
        }
        unfinished = set(collectors)
        left = deque(requests)
        try:
            while unfinished:
                self._submit_some(left, len(unfinished) - len(left), inbox.put)
                for delta in inbox.get():
                    collector = collectors[delta.request_id]
                    if not collector.add(delta):
                        continue
                    unfinished.discard(delta.request_id)
                    collector.result()
                    if progress is not None:
                        progress(len(requests) - len(unfinished), len(requests))
        finally:
            for request_id in unfinished:  # an error, or Ctrl-C
                self._thread.abort(request_id)
        return [collectors[request.id].result() for request in requests]

    def _submit_some(self, left: deque[Request], running: int, sink: Sink) -> None:
        """Hands in as many as may wait; the others once some of those `running` have ended."""
        while left:
            try:
                self._thread.submit(left[0], sink)
            except BusyError:
                if running:
                    return
                raise
            left.popleft()
            running += 1

    def _stream(self, request: Request) -> Iterator[SequenceDelta]:
        """Refuses a bad request at once; hands it in when the iteration begins, so that one
        that never begins leaves nothing running."""
        self._core.check(request)
        return self._follow(request)

    def _follow(self, request: Request) -> Iterator[SequenceDelta]:
        deltas = DeltaStream(self._thread, request)
        try:
            yield from deltas
        finally:
            deltas.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _wishes(
    priority: int | Sequence[int], slo: Slo | Sequence[Slo], many: Sequence[object]
) -> list[tuple[int, Slo]]:
    """(priority, SLO class) of each."""
    priorities = [priority] * len(many) if isinstance(priority, int) else list(priority)
    classes = [slo] * len(many) if isinstance(slo, str | SloClass) else list(slo)
    for name, values in (("priority", priorities), ("slo", classes)):
        if len(values) != len(many):
            raise ParameterError(
                name, f"{len(values)} of {name} for {len(many)} prompts; give one for all or each"
            )
    return list(zip(priorities, classes, strict=True))


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    many = list(params)
    if len(many) != count:
        raise ParameterError(
            "sampling_params",
            f"{len(many)} sampling parameters for {count} prompts; give one for all or one each",
        )
    return many


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    items = list(messages)
    if not items:
        raise TemplateError("the conversation is empty; give at least one message")
    if isinstance(items[0], Mapping):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
