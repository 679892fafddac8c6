"""The step loop of an encoder: schedule, run, hand out vectors; single-threaded.

The scheduler is that of generation: a text is a sequence that ends with the step that
computes it. Chunking is "whole", as every token sees every other; blocks are only counted,
since nothing is kept, and there are as many as all seats can need, so nobody is preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import NoIndex
from trimaran.core.clock import Clock, SystemClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BackendError, ConfigError, RequestError
from trimaran.core.outputs import RequestMetrics
from trimaran.core.request import FinishReason, Request, Sequence
from trimaran.core.step_plan import StepPlan
from trimaran.engine.admission import Admission
from trimaran.engine.metrics import EngineMetrics
from trimaran.engine.step_log import StepLog, StepRecord
from trimaran.models.bert import EncoderConfig
from trimaran.models.tokenizer import Tokenizer
from trimaran.schedule.scheduler import ScheduledStep, Scheduler

Vector = npt.NDArray[np.float32]


class Encoder(Protocol):
    """What computes a step."""

    def run(self, plan: StepPlan) -> Vector:
        """[sequences, width]: the vector of each."""
        ...

    def describe(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request that has ended: its vector, float32 [width], or why there is none."""

    request: Request
    metrics: RequestMetrics
    vector: Vector | None
    error: str | None = None


class EncoderCore:
    """One encoder, one scheduler; every call from one thread."""

    def __init__(
        self,
        model: EncoderConfig,
        tokenizer: Tokenizer,
        backend: Encoder,
        config: EngineConfig,
        clock: Clock,
    ) -> None:
        """
        Raises:
            ConfigError: an option can't be honoured; names it.
        """
        longest = config.max_model_len or model.context_length
        if longest > model.context_length:
            raise ConfigError(
                f"max_model_len is {longest}, above the model's context of"
                f" {model.context_length}; lower it"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.backend = backend
        self.config = config
        self.max_model_len = longest
        self.clock = clock
        self.metrics = EngineMetrics()
        self.steps = StepLog()
        blocks = config.max_num_seqs * -(-longest // config.block_size)
        kv = KVCacheManager(blocks, config.block_size, index=NoIndex())
        own = replace(config, preset=None, chunking="whole", chunk_size=None)
        self.scheduler = Scheduler(own, kv, clock, max_model_len=longest)
        self.admission = Admission(config.max_waiting, config.max_num_seqs)
        self._live: dict[Sequence, RequestMetrics] = {}
        self._by_id: dict[str, Sequence] = {}

    def check(self, request: Request) -> None:
        """Raises `RequestError` where a text can't be encoded."""
        ids = request.prompt
        if not ids:
            raise RequestError("the text has no tokens; give at least one")
        if len(ids) > self.max_model_len:
            raise RequestError(
                f"the text has {len(ids)} tokens; this model takes {self.max_model_len} at most;"
                " shorten it, or give truncate_prompt_tokens"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.model.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"the text has token id {bad}; this model's are 0 to {self.model.vocab_size - 1}"
            )

    def add(self, request: Request) -> None:
        """Takes a request in that was checked."""
        sequence = Sequence(request=request, index=0, tokens=list(request.prompt))
        self.scheduler.add(sequence)
        self._live[sequence] = RequestMetrics(arrival=request.arrival)
        self._by_id[request.id] = sequence

    def abort(self, request_id: str) -> None:
        """Ends a request that hasn't ended; nothing comes of it."""
        if (sequence := self._by_id.pop(request_id, None)) is not None:
            del self._live[sequence]
            self.scheduler.finish(sequence, FinishReason.ABORT)
            self.admission.ended(self.clock.now())

    def metrics_of(self, request_id: str) -> RequestMetrics:
        """The times of a request that hasn't ended."""
        sequence = self._by_id.get(request_id)
        return RequestMetrics(self.clock.now()) if sequence is None else self._live[sequence]

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[Encoded]:
        """Encodes the texts whose turn it is; those that fail, fail with the reason."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        begin = self.clock.now()
        vectors: Vector | None = None
        error: str | None = None
        try:
            vectors = self.backend.run(step.plan)
        except Exception as failure:  # whatever it was, the others go on
            error = f"{type(failure).__name__}: {failure}"
        if vectors is not None and not np.isfinite(vectors).all():
            vectors, error = None, str(BackendError("the model gave numbers that aren't finite"))
        if vectors is not None:
            self.scheduler.commit(step)
        end = self.clock.now()
        self._log(step, begin, end)
        reason = FinishReason.STOP if error is None else FinishReason.ERROR
        found = []
        for i, entry in enumerate(step.entries):
            metrics = self._live.pop(entry.sequence)
            del self._by_id[entry.sequence.request.id]
            metrics.first_scheduled, metrics.first_token, metrics.finished = begin, end, end
            self.scheduler.finish(entry.sequence, reason)
            self.admission.ended(end)
            vector = None if vectors is None else vectors[i]
            found.append(Encoded(entry.sequence.request, metrics, vector, error))
        return found

    def _log(self, step: ScheduledStep, begin: float, end: float) -> None:
        scheduler, usage = self.scheduler, self.scheduler.kv.usage()
        self.metrics.steps += 1
        self.metrics.step_tokens.observe(step.plan.rows)
        self.steps.add(
            StepRecord(
                self.metrics.steps,
                begin,
                end - begin,
                step.plan.rows,
                0,
                scheduler.num_running,
                scheduler.num_waiting,
                usage.held,
                usage.cached,
                live=0,
            )
        )


def load_encoder_core(
    folder: Path,
    config: EngineConfig,
    phase_done: Callable[[str], None],
    clock: Clock | None = None,
) -> EncoderCore:
    """An encoder's folder, ready to step.

    Raises:
        TrimaranError: of the class that names the trouble.
    """
    from trimaran.compute.reference.encoder import ReferenceEncoder
    from trimaran.models.encoder_folder import load_encoder

    if config.backend == "native":
        raise BackendError(
            "backend is 'native', and encoders are computed by the reference back end alone;"
            " leave the option out"
        )
    model = load_encoder(folder)
    phase_done("read checkpoint")
    tokenizer = Tokenizer.from_folder(folder)
    phase_done("build tokenizer")
    return EncoderCore(
        model.config, tokenizer, ReferenceEncoder(model), config, clock or SystemClock()
    )
