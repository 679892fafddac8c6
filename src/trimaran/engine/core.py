"""The step loop: schedule, run, sample, assemble; single-threaded and synchronous."""

from __future__ import annotations

import itertools

import numpy as np

from trimaran.compute.backend import Backend
from trimaran.core.clock import Clock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BackendError, CapacityError, RequestError
from trimaran.core.outputs import SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.core.sampling_batch import Float32
from trimaran.core.uniforms import derive_seed
from trimaran.engine.generation import Generation, LiveRequest, take_token
from trimaran.engine.sampling import Pick, choose, score_picks, score_prompt
from trimaran.models.config import ModelConfig
from trimaran.models.tokenizer import Tokenizer
from trimaran.schedule.scheduler import ScheduledStep, Scheduler


class EngineCore:
    """One model, one back end, one scheduler; every call from one thread.

    A request that fails, fails alone: a step that can't run ends the requests that were in
    it, a row that can't be sampled ends its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        backend: Backend,
        scheduler: Scheduler,
        config: EngineConfig,
        max_model_len: int,
        clock: Clock,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.backend = backend
        self.scheduler = scheduler
        self.config = config
        self.max_model_len = max_model_len
        self.clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._arrivals = itertools.count()

    # ------------------------------------------------------------------ requests

    def check(self, request: Request) -> None:
        """Raises `RequestError` where a request could never be served."""
        if request.id in self._live:
            raise RequestError(f"request id '{request.id}' is already in use; give another")
        length, params = len(request.prompt), request.params
        if length == 0:
            raise RequestError("the prompt has no tokens; give at least one")
        if length >= self.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; with one to generate, at most"
                f" {self.max_model_len - 1} fit max_model_len {self.max_model_len}"
            )
        if request.adapter:
            raise RequestError(
                f"the request wants adapter '{request.adapter}', and this engine has none; leave"
                " it empty"
            )
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.model.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"the prompt has token id {bad}; this model's are 0 to {self.model.vocab_size - 1}"
            )
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if token >= self.model.vocab_size:
                    raise RequestError(
                        f"{name} has token id {token}; this model's are"
                        f" 0 to {self.model.vocab_size - 1}"
                    )
        if params.n > self.config.max_num_seqs:
            raise RequestError(
                f"n is {params.n}, above max_num_seqs {self.config.max_num_seqs}; lower it"
            )

    def add(self, request: Request) -> None:
        """Takes a request in; its deltas come from the steps that follow.

        Raises:
            RequestError: it could never be served.
        """
        self.check(request)
        ordinal = next(self._arrivals)
        seed = request.params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, ordinal)
        live = LiveRequest.start(
            request, self.tokenizer, self.model.eos_token_ids, self.max_model_len, seed
        )
        self.scheduler.add(live.generations[0].sequence)
        self._live[request.id] = live

    def abort(self, request_id: str) -> list[SequenceDelta]:
        """Ends a request at once and frees what it holds; unknown ids are ignored."""
        live = self._live.get(request_id)
        return [] if live is None else self._end(live, FinishReason.ABORT)

    def is_live(self, request_id: str) -> bool:
        """Whether the request was taken in and has not ended."""
        return request_id in self._live

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    # ------------------------------------------------------------------ a step

    def step(self) -> list[SequenceDelta]:
        """Runs one step; returns what it added, and to whom."""
        try:
            step = self.scheduler.schedule()
        except CapacityError as error:  # one sequence has outgrown the cache
            if error.request_id not in self._live:
                raise
            return self._end(self._live[error.request_id], FinishReason.ERROR, str(error))
        if step is None:
            return []
        self._note_scheduled(step)
        try:
            logits = self.backend.run(step.plan)
        except Exception as error:  # whatever it was, only this step's requests pay
            return self._fail_step(step, f"the step failed: {error}")
        self.scheduler.commit(step)
        self._score_prompts(step, logits)
        return self._sample(step, logits, self._picks(step))

    def _note_scheduled(self, step: ScheduledStep) -> None:
        now = self.clock.now()
        for sequence in step.admitted:
            metrics = self._live[sequence.request.id].metrics
            if metrics.first_scheduled is None:
                metrics.first_scheduled = now
                metrics.cached_tokens = sequence.cached
        for sequence in step.preempted:
            live = self._live.get(sequence.request.id)
            if live is not None:  # else it was aborted before this step
                live.metrics.preemptions += 1

    def _picks(self, step: ScheduledStep) -> list[Pick]:
        """Who samples, from which row; a request with n > 1 forks here, all from one row."""
        picks: list[Pick] = []
        for sequence, row in step.sampling():
            live = self._live[sequence.request.id]
            picks.append(Pick(live.generations[sequence.index], row))
            if live.request.params.n > 1 and not sequence.forked:
                for child in live.fork():
                    self.scheduler.fork(sequence, child.sequence)
                    picks.append(Pick(child, row))
        return picks

    def _sample(
        self, step: ScheduledStep, logits: Float32, picks: list[Pick]
    ) -> list[SequenceDelta]:
        if not picks:
            return []
        sampler = self.backend.sampler
        try:
            tokens, errors = choose(sampler, logits, picks)
        except BackendError as error:
            return self._end(picks[0].generation.live, FinishReason.ERROR, str(error))
        if not errors:
            self.scheduler.sampled(step, tokens)  # type: ignore[arg-type]
        entries = score_picks(sampler, logits, picks, tokens)
        now = self.clock.now()
        deltas: list[SequenceDelta] = []
        for i, (pick, token) in enumerate(zip(picks, tokens, strict=True)):
            generation = pick.generation
            if generation.sequence.finished:
                continue
            if token is None:
                deltas += self._end(generation.live, FinishReason.ERROR, errors[i])
                continue
            delta, reason = take_token(generation, token)
            logprobs = entries[i]
            delta.logprobs = None if logprobs is None else [logprobs]
            self._complete(generation, delta, reason, now)
            deltas.append(delta)
        return deltas

    def _complete(
        self,
        generation: Generation,
        delta: SequenceDelta,
        reason: FinishReason | None,
        now: float,
    ) -> None:
        live = generation.live
        if live.metrics.first_token is None:
            live.metrics.first_token = now
            delta.prompt_logprobs = live.prompt_logprobs
        delta.metrics = live.metrics
        if reason is None:
            return
        delta.finish_reason = reason
        self.scheduler.finish(generation.sequence, reason)
        if live.ended:
            self._forget(live, now)

    # ------------------------------------------------------------------ prompt scores

    def _score_prompts(self, step: ScheduledStep, logits: Float32) -> None:
        """Each prompt token is scored by the logits of the row before it."""
        if not step.scoring:
            return
        for scheduled in step.entries:
            sequence = scheduled.sequence
            live = self._live[sequence.request.id]
            top, found = live.request.params.prompt_logprobs, live.prompt_logprobs
            if top is None or found is None or len(found) >= sequence.prompt_length:
                continue
            first = scheduled.start + 1  # the token that the chunk's first row predicts
            last = min(scheduled.start + scheduled.count, sequence.prompt_length - 1)
            done = len(found)  # recomputation after preemption scores nothing twice
            if last < done or first > done:
                continue
            begin = scheduled.logits.start + done - first
            rows = np.arange(begin, begin + last - done + 1, dtype=np.int32)
            targets = np.array(sequence.tokens[done : last + 1], np.int32)
            found += score_prompt(self.backend.sampler, logits, rows, targets, top, self.tokenizer)

    # ------------------------------------------------------------------ endings

    def _fail_step(self, step: ScheduledStep, why: str) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = []
        for scheduled in step.entries:
            live = self._live.get(scheduled.sequence.request.id)
            if live is not None:
                deltas += self._end(live, FinishReason.ERROR, why)
        return deltas

    def _end(
        self, live: LiveRequest, reason: FinishReason, error: str | None = None
    ) -> list[SequenceDelta]:
        """Ends all of a request's unfinished sequences at once."""
        deltas: list[SequenceDelta] = []
        for generation in live.generations:
            sequence = generation.sequence
            if sequence.finished:
                continue
            self.scheduler.finish(sequence, reason)
            deltas.append(
                SequenceDelta(
                    live.request.id,
                    sequence.index,
                    text=generation.text.finish(),
                    finish_reason=reason,
                    error=error,
                    metrics=live.metrics,
                )
            )
        self._forget(live, self.clock.now())
        return deltas

    def _forget(self, live: LiveRequest, now: float) -> None:
        live.metrics.finished = now
        self._live.pop(live.request.id, None)
