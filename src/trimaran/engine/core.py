"""The step loop: schedule, run, sample, assemble; single-threaded and synchronous."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from trimaran.compute.backend import Backend
from trimaran.core.clock import Clock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BackendError, CapacityError, RequestError
from trimaran.core.outputs import RequestMetrics, SequenceDelta
from trimaran.core.request import FinishReason, Request, Sequence, SequenceStatus
from trimaran.core.retention import Retention
from trimaran.core.sampling_batch import Float32
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.core.uniforms import derive_seed
from trimaran.engine.admission import Admission
from trimaran.engine.assembly import (
    EndedRequest,
    Event,
    PooledPrompt,
    SampledToken,
    ScoredPrompt,
    assemble,
)
from trimaran.engine.doing import Doing
from trimaran.engine.generation import Generation, LiveRequest, take_token
from trimaran.engine.lengths import LengthRecord, Lengths
from trimaran.engine.metrics import EngineMetrics
from trimaran.engine.pooling import Pools, check_pooling
from trimaran.engine.sampling import Pick, Prepared, choose, sampling_batch, score_picks
from trimaran.engine.side_thread import Job, SideThread
from trimaran.engine.step_log import StepLog, StepRecord
from trimaran.models.config import ModelConfig
from trimaran.models.tokenizer import Tokenizer
from trimaran.schedule.scheduler import ScheduledStep, Scheduler


class Service(Protocol):
    """Something that runs beside the steps for as long as the engine does."""

    def close(self) -> None: ...


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
        self.services: list[Service] = []
        self.stalled = False
        self.wake: Callable[[], None] = lambda: None
        self.metrics = EngineMetrics()
        self.steps = StepLog()
        self.lengths = Lengths()  # of the sequences that were answered
        self.record: LengthRecord | None = None  # to which they are added at the end
        self._live: dict[str, LiveRequest] = {}
        self._open: dict[str, LiveRequest] = {}  # those whose prompts still arrive
        self._generations: dict[Sequence, Generation] = {}
        self._pools = Pools(model.hidden_size)
        self._stopped: list[Generation] = []  # by their text; the scheduler doesn't know yet
        self._computing = False
        self._observed: tuple[ScheduledStep, float] | None = None  # the cost model hasn't yet
        self.doing: Doing | None = None
        self.on_step: Callable[[ScheduledStep], None] | None = None  # told before it is run
        self.progress = 0  # changes when a step has brought some request further
        self.admission = Admission(config.max_waiting, config.max_num_seqs)
        self._arrivals = itertools.count()

    # ------------------------------------------------------------------ requests

    def check(self, request: Request, *, complete: bool = True) -> None:
        """Raises `RequestError` where a request could never be served.

        Args:
            complete: the prompt is all there; of one that isn't, what is there is checked.
        """
        if request.id in self._live:
            raise RequestError(f"request id '{request.id}' is already in use; give another")
        params = request.params
        if complete and not request.prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        if not isinstance(request.cache_salt, str):
            raise RequestError(f"cache_salt is {request.cache_salt!r}; give a text")
        if not isinstance(request.retention, Retention | None):
            raise RequestError(
                f"retention is {request.retention!r}; give Retention(priority, seconds)"
            )
        if request.adapter:
            raise RequestError(
                f"the request wants adapter '{request.adapter}', and this engine has none; leave"
                " it empty"
            )
        self._check_prompt(len(request.prompt), request.prompt, request.pooling)
        if request.pooling is not None:
            check_pooling(request, complete)
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
        if not complete and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs can't be had for a prompt that still arrives; leave it out, or"
                " send the prompt at once"
            )

    def _check_prompt(self, length: int, ids: list[int], pooling: str | None = None) -> None:
        """Raises `RequestError` for a prompt of so many tokens, or one with such ids."""
        if pooling is not None and length > self.max_model_len:
            raise RequestError(
                f"the text has {length} tokens; at most {self.max_model_len} fit max_model_len;"
                " shorten it"
            )
        if pooling is None and length >= self.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; with one to generate, at most"
                f" {self.max_model_len - 1} fit max_model_len {self.max_model_len}"
            )
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.model.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"the prompt has token id {bad}; this model's are 0 to {self.model.vocab_size - 1}"
            )

    def add(self, request: Request) -> LiveRequest:
        """Takes a request in; its deltas come from the steps that follow.

        Raises:
            RequestError: it could never be served.
        """
        self.check(request)
        live = self._start(request)
        self.scheduler.add(live.generations[0].sequence)
        self._take_in(live)
        return live

    def _start(self, request: Request) -> LiveRequest:
        ordinal = next(self._arrivals)
        seed = request.params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, ordinal)
        return LiveRequest.start(
            request, self.tokenizer, self.model.eos_token_ids, self.max_model_len, seed
        )

    def _take_in(self, live: LiveRequest) -> None:
        self._live[live.request.id] = live
        self._generations[live.generations[0].sequence] = live.generations[0]
        if live.request.pooling is not None:
            self._pools.add(live.generations[0].sequence)

    # ------------------------------------------------------------------ prompts that arrive

    def open(self, request: Request) -> LiveRequest:
        """Takes a request in whose prompt still arrives: `extend`, then `complete`.

        Raises:
            RequestError: it could never be served.
        """
        self.check(request, complete=False)
        if self.config.chunking == "static":
            raise RequestError(
                "chunking is 'static', whose batches would wait for a prompt that still arrives;"
                " send the prompt at once, or use another chunking"
            )
        live = self._start(request)
        sequence = live.generations[0].sequence
        sequence.open = True
        sequence.status = SequenceStatus.PARKED
        self._take_in(live)
        self._open[request.id] = live
        return live

    def extend(self, request_id: str, ids: list[int]) -> list[Event]:
        """More tokens of an open request's prompt, which nothing will change; they are
        computed as soon as there is room, but for the last one: from its row the first token
        of the answer is sampled. Ids of requests that aren't open are ignored."""
        live = self._open.get(request_id)
        if live is None or not ids:
            return []
        known = live.held + ids
        live.held = known[-1:]
        return self._grow(live, known[:-1])

    def complete(self, request_id: str, ids: list[int], *, anew: bool = False) -> list[Event]:
        """The last tokens of an open request's prompt: now it is answered.

        Args:
            anew: the ids are the whole prompt, and what came before is void.
        """
        live = self._open.get(request_id)
        if live is None:
            return []
        sequence = live.generations[0].sequence
        if anew:
            self.scheduler.park(sequence)
            live.request.prompt.clear()
            sequence.tokens.clear()
            live.held = []
        if not (sequence.tokens or live.held or ids):
            why = "the prompt has no tokens; give at least one"
            return self._end(live, FinishReason.ERROR, why)
        del self._open[request_id]
        sequence.open = False
        events = self._grow(live, live.held + ids)
        if events:
            return events
        live.complete(self.max_model_len)
        live.metrics.prompt_complete = self.clock.now()
        return []

    def _grow(self, live: LiveRequest, ids: list[int]) -> list[Event]:
        sequence = live.generations[0].sequence
        try:
            self._check_prompt(len(sequence.tokens) + len(ids), ids)
            live.request.prompt += ids
            sequence.tokens += ids
            if ids and sequence.status is SequenceStatus.PARKED:
                self.scheduler.add(sequence)
        except (RequestError, CapacityError) as error:
            return self._end(live, FinishReason.ERROR, str(error))
        return []

    def abort(self, request_id: str) -> list[Event]:
        """Ends a request at once and frees what it holds; unknown ids are ignored."""
        live = self._live.get(request_id)
        return [] if live is None else self._end(live, FinishReason.ABORT)

    def fail(self, lives: Iterable[LiveRequest], why: str) -> list[Event]:
        """Ends those of the requests that have not ended, as failed."""
        return [
            event
            for live in lives
            if live.request.id in self._live
            for event in self._end(live, FinishReason.ERROR, why)
        ]

    def stuck(self) -> list[LiveRequest]:
        """Those that wait for a step, and not for more of their prompts."""
        return [
            live
            for live in tuple(self._live.values())
            if live.request.id not in self._open or not live.generations[0].sequence.idle
        ]

    def requests_of(self, step: ScheduledStep) -> list[LiveRequest]:
        """Those in a step that have not ended."""
        found = (self._generations.get(sequence) for sequence in step.chosen.sequences)
        return list(dict.fromkeys(generation.live for generation in found if generation))

    def metrics_of(self, request_id: str) -> RequestMetrics | None:
        """The times so far of a request that has not ended; may be read on any thread."""
        live = self._live.get(request_id)
        return None if live is None else live.metrics

    def is_live(self, request_id: str) -> bool:
        """Whether the request was taken in and has not ended."""
        return request_id in self._live

    @property
    def has_work(self) -> bool:
        """Whether a request waits for anything but more of its prompt."""
        if len(self._live) > len(self._open):
            return True
        return any(not live.generations[0].sequence.idle for live in tuple(self._open.values()))

    # ------------------------------------------------------------------ a step

    def step(self) -> list[SequenceDelta]:
        """Runs one step and finishes everything about it; what it added, and to whom."""
        return [delta for own in self.assemble(self.compute()).values() for delta in own]

    def compute(self, aside: SideThread | None = None, meanwhile: Job | None = None) -> list[Event]:
        """Runs one step as far as the next one needs it.

        Afterwards `stalled` says that there was nothing to run though there is work: all of it
        waits for a lower tier of the KV cache, and `wake` will be called, from another thread,
        when a step may have something to run again.

        Args:
            aside: where `meanwhile` and what prepares the sampling run while the back end
                computes; without one they run before it.
            meanwhile: what is left of the step before: its `assemble`, and the delivery.

        Returns:
            What happened, for `assemble`.
        """
        begin = self.clock.now()
        self.doing = Doing("scheduling")
        try:
            step = self.scheduler.schedule()
        except CapacityError as error:  # one sequence has outgrown the cache
            if error.request_id not in self._live:
                raise
            if meanwhile is not None:
                meanwhile()  # in which it may turn out to have ended
            self.doing = None
            live = self._live.get(error.request_id)
            return [] if live is None else self._end(live, FinishReason.ERROR, str(error))
        self.stalled = step is None
        if step is None:
            if meanwhile is not None:
                meanwhile()
            self.metrics.idle()
            self.doing = None
            return []
        self.metrics.schedule_seconds.observe(self.clock.now() - begin)
        if self.on_step is not None:
            self.on_step(step)
        events = self._run(step, aside, meanwhile)
        self.doing = None
        return events

    def _run(
        self, step: ScheduledStep, aside: SideThread | None, meanwhile: Job | None
    ) -> list[Event]:
        prepared: list[Prepared] = []

        def job() -> None:
            if self._observed is not None:
                self.scheduler.observe(*self._observed)
                self._observed = None
            prepared.append(self._prepare(step))
            if meanwhile is not None:
                meanwhile()

        failure: Exception | None = None
        logits: Float32 | None = None
        self._computing = True
        self.doing = Doing("computing", step)
        if aside is None:
            job()
        else:
            aside.start(job)
        pooled = self._pools.rows_of(step)
        begin = self.clock.now()
        self.metrics.forward_begins(begin)
        try:
            logits = _checked(self.backend.run(step.plan, pooled), step.plan)
        except Exception as error:  # whatever it was, only this step's requests pay
            failure = error
        finally:
            end = self.clock.now()
            self.metrics.forward_ended(end)
            if aside is not None:
                aside.join()
            self._computing = False
        self.doing = Doing("sampling", step)
        ended = self._take_out_stopped()
        if logits is None:
            self._log(step, begin, end)
            return self._fail_step(step, f"the step failed: {failure}")
        self.scheduler.commit(step)
        self._log(step, begin, end)
        events = self._score_prompts(step, logits)
        ready = prepared[0]
        if ended or events or ready.forks:
            ready = self._changed(ready)
        self._note_progress(step, ready)
        if pooled is not None:
            events += self._end_pooled(step, pooled)
        events += self._sample(step, logits, ready)
        self._observed = (step, self.clock.now() - step.time)
        return events

    def _log(self, step: ScheduledStep, begin: float, end: float) -> None:
        scheduler = self.scheduler
        pool = scheduler.kv.pool
        self.metrics.step_tokens.observe(step.prefill_tokens + step.decode_tokens)
        self.steps.add(
            StepRecord(
                self.metrics.steps,
                begin,
                end - begin,
                step.prefill_tokens,
                step.decode_tokens,
                scheduler.num_running,
                scheduler.num_waiting,
                pool.num_held,
                pool.num_cached,
                scheduler.live_tokens(),
            )
        )

    def _note_progress(self, step: ScheduledStep, ready: Prepared) -> None:
        """Recomputing what was computed before and then lost is none."""
        further = bool(ready.picks)
        if not further:
            for sequence in step.chosen.sequences:
                generation = self._generations.get(sequence)
                if generation is not None and sequence.computed > generation.furthest:
                    generation.furthest = sequence.computed
                    further = True
        self.progress += further

    def _prepare(self, step: ScheduledStep) -> Prepared:
        """What sampling needs and the logits have no part in."""
        self._note_scheduled(step)
        generations = self._generations
        picks = [
            Pick(generations[sequence], row)
            for sequence, row in step.sampling()
            if not sequence.open
        ]
        forks = any(
            pick.generation.live.request.params.n > 1 and not pick.generation.sequence.forked
            for pick in picks
        )
        return Prepared(picks, sampling_batch(picks), forks)

    def _note_scheduled(self, step: ScheduledStep) -> None:
        for sequence in step.admitted:
            metrics = self._generations[sequence].live.metrics
            if metrics.first_scheduled is None:
                metrics.first_scheduled = step.time
                metrics.cached_tokens = sequence.cached
        for sequence in step.preempted:
            live = self._live.get(sequence.request.id)
            if live is not None:  # else it was aborted before this step
                live.metrics.preemptions += 1

    def _changed(self, prepared: Prepared) -> Prepared:
        """Without the sequences that have ended meanwhile; a request with n > 1 forks here,
        all of it samples from one row."""
        picks: list[Pick] = []
        for pick in prepared.picks:
            sequence, live = pick.generation.sequence, pick.generation.live
            if sequence.finished:
                continue
            picks.append(pick)
            if live.request.params.n > 1 and not sequence.forked:
                for child in live.fork():
                    self._generations[child.sequence] = child
                    self.scheduler.fork(sequence, child.sequence)
                    picks.append(Pick(child, pick.row))
        return Prepared(picks, sampling_batch(picks), forks=False)

    def _sample(self, step: ScheduledStep, logits: Float32, ready: Prepared) -> list[Event]:
        picks = ready.picks
        if not picks:
            return []
        sampler = self.backend.sampler
        try:
            tokens, errors = choose(sampler, logits, picks, ready.batch)
        except BackendError as error:
            return self._end(picks[0].generation.live, FinishReason.ERROR, str(error))
        if not errors:
            self.scheduler.sampled(step, tokens)  # type: ignore[arg-type]
        scores, places = score_picks(sampler, logits, picks, tokens)
        now = self.clock.now()
        events: list[Event] = []
        for i, (pick, token) in enumerate(zip(picks, tokens, strict=True)):
            generation = pick.generation
            if generation.sequence.finished:
                continue
            if token is None:
                events += self._end(generation.live, FinishReason.ERROR, errors[i])
                continue
            reason = take_token(generation, token)
            place = places.get(i)
            events.append(
                SampledToken(
                    generation,
                    token,
                    generation.sequence.output_length,
                    reason,
                    None if place is None else scores,
                    place or 0,
                    now,
                )
            )
            if reason is not None:
                self._finish(generation, reason, now)
        self.metrics.generated_tokens += len(picks) - len(errors)
        return events

    def close(self) -> None:
        """Stops what runs beside the steps, and frees the back end; may be called twice."""
        while self.services:
            self.services.pop().close()
        self.backend.close()
        if self.record is not None:
            self.record.add(self.lengths)
            self.record = None

    # ------------------------------------------------------------------ prompts alone

    def _end_pooled(self, step: ScheduledStep, pooled: PooledRows) -> list[Event]:
        """Ends those of a step that was run whose prompts are whole: they have their vectors."""
        events: list[Event] = []
        now = self.clock.now()
        self._pools.take(step, pooled)
        for sequence in self._pools.whole(step):
            generation = self._generations[sequence]
            try:
                vector = self._pools.vector(sequence)
            except BackendError as error:
                events += self._end(generation.live, FinishReason.ERROR, str(error))
                continue
            events.append(PooledPrompt(generation, vector, now))
            self._finish(generation, FinishReason.STOP, now)
        return events

    def _score_prompts(self, step: ScheduledStep, logits: Float32) -> list[Event]:
        """Each prompt token is scored by the logits of the row before it."""
        if not step.scoring:
            return []
        events: list[Event] = []
        for scheduled in step.entries:
            sequence = scheduled.sequence
            top = sequence.request.params.prompt_logprobs
            if top is None or sequence.finished:
                continue
            live = self._live[sequence.request.id]
            done = live.prompt_scored  # recomputation after preemption scores nothing twice
            first = scheduled.start + 1  # the token that the chunk's first row predicts
            last = min(scheduled.start + scheduled.count, sequence.prompt_length - 1)
            if done >= sequence.prompt_length or last < done or first > done:
                continue
            begin = scheduled.logits.start + done - first
            rows = np.arange(begin, begin + last - done + 1, dtype=np.int32)
            targets = np.array(sequence.tokens[done : last + 1], np.int32)
            try:
                scores = self.backend.sampler.score(logits, rows, targets, top)
            except BackendError as error:  # a row of it is no numbers
                events += self._end(live, FinishReason.ERROR, str(error))
                continue
            events.append(ScoredPrompt(live, targets, scores))
            live.prompt_scored = last + 1
        return events

    # ------------------------------------------------------------------ deltas

    def assemble(self, events: list[Event]) -> dict[LiveRequest, list[SequenceDelta]]:
        """Text and deltas of what happened, by request; may run on another thread while this
        one is inside the back end. Events must come in order, each once."""
        assembled = assemble(events, self.tokenizer)
        self._stopped += assembled.stopped
        for live in assembled.answered:
            live.metrics.cost = self.metrics.objective.add(live.request.slo, live.metrics)
        if not self._computing:
            self._take_out_stopped()
        return assembled.deltas

    def _take_out_stopped(self) -> bool:
        """Ends the sequences whose text had a stop string; whether there were any. Their rows
        of the step that has just run are thrown away before anything is made of them."""
        stopped, self._stopped = self._stopped, []
        for generation in stopped:
            self._finish(generation, FinishReason.STOP, self.clock.now())
        return bool(stopped)

    # ------------------------------------------------------------------ endings

    def _finish(self, generation: Generation, reason: FinishReason, now: float) -> None:
        """One sequence has ended, perhaps as the last of its request."""
        self.scheduler.finish(generation.sequence, reason)
        self.lengths.add(generation.sequence.total)
        if generation.live.ended:
            self._forget(generation.live, now)

    def _fail_step(self, step: ScheduledStep, why: str) -> list[Event]:
        events: list[Event] = []
        for sequence in self.scheduler.lost_with(step):
            live = self._live.get(sequence.request.id)
            if live is not None:
                events += self._end(live, FinishReason.ERROR, why)
        return events

    def _end(
        self, live: LiveRequest, reason: FinishReason, error: str | None = None
    ) -> list[Event]:
        """Ends all of a request's unfinished sequences at once."""
        ended = [g for g in live.generations if not g.sequence.finished]
        for generation in ended:
            self.scheduler.finish(generation.sequence, reason)
        self._forget(live, self.clock.now())
        return [EndedRequest(live, ended, reason, error)]

    def _forget(self, live: LiveRequest, now: float) -> None:
        if live.metrics.finished is None:
            live.metrics.finished = now
        self.admission.ended(now)
        self._live.pop(live.request.id, None)
        self._open.pop(live.request.id, None)
        for generation in live.generations:
            self._generations.pop(generation.sequence, None)
            self._pools.drop(generation.sequence)


def _checked(logits: Float32, plan: StepPlan) -> Float32:
    """The logits, if there is a row for each that was wanted."""
    if logits.ndim != 2 or len(logits) != len(plan.logit_rows):
        raise BackendError(
            f"the back end gave logits of shape {logits.shape} for {len(plan.logit_rows)} rows"
        )
    return logits
