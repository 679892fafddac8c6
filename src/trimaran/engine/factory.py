"""Puts an engine together: checkpoint, back end, cache, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.cache.manager import KVCacheManager
from trimaran.compute.backend import Backend
from trimaran.core.clock import Clock, SystemClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BackendError
from trimaran.engine.core import EngineCore
from trimaran.engine.memory import available_bytes, plan_cache
from trimaran.models.chat_template import ChatTemplate
from trimaran.models.load import load_checkpoint
from trimaran.models.model import Model
from trimaran.models.store import resolve
from trimaran.models.tokenizer import Tokenizer
from trimaran.schedule.scheduler import Scheduler

log = logging.getLogger("trimaran")


@dataclass(slots=True)
class Phases:
    """Seconds that each phase of the start-up took, in order."""

    seconds: dict[str, float] = field(default_factory=dict)
    report: Callable[[str, float], None] | None = None
    _last: float = field(default_factory=time.perf_counter)

    def done(self, name: str) -> None:
        """The phase that ran since the last call was `name`."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
        if self.report is not None:
            self.report(name, self.seconds[name])


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready, and what it was made from."""

    core: EngineCore
    path: Path
    chat_template: ChatTemplate | None
    phases: Phases


def load_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    phases: Phases | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedEngine:
    """Loads a model by path, known name or hub name, ready to step.

    Args:
        progress: of a download, called with (bytes so far, bytes in all).

    Raises:
        TrimaranError: of the class that names the trouble (see `core/errors.py`).
    """
    phases = phases or Phases()
    path = resolve(model, progress=progress)
    phases.done("find model")
    checkpoint = load_checkpoint(path)
    phases.done("read checkpoint")
    tokenizer = checkpoint.tokenizer()
    phases.done("build tokenizer")
    backend = make_backend(checkpoint.model, config)
    phases.done("pack weights")
    core = make_core(checkpoint.model, tokenizer, backend, config, clock or SystemClock())
    phases.done("allocate cache")
    return LoadedEngine(core, path, checkpoint.chat_template(), phases)


def make_backend(model: Model, config: EngineConfig) -> Backend:
    """The back end that the configuration asks for.

    Raises:
        BackendError: it can't run here; says why.
    """
    from trimaran.compute import native

    name = config.backend
    if name == "auto":
        name = "native" if native.is_available() else "reference"
        if name == "reference":
            log.warning(
                "the native kernels are not available (%s); the reference back end is many"
                " times slower",
                native.unavailable_reason(),
            )
    if name == "native":
        if not native.is_available():
            raise BackendError(
                f"backend is 'native', but its kernels are not available:"
                f" {native.unavailable_reason()}; install a C++ compiler and reinstall, or use"
                f" backend='reference'"
            )
        from trimaran.compute.native.backend import NativeBackend

        return NativeBackend(
            model,
            weights=config.weights,
            isa=config.isa,
            threads=config.threads,
            max_rows=config.max_num_batched_tokens,
        )
    for option, default in (("isa", "auto"), ("weights", "as-is")):
        if getattr(config, option) != default:
            raise BackendError(
                f"{option} is '{getattr(config, option)}', which the reference back end doesn't"
                f" have (it computes in float32); leave it at '{default}' or use the native one"
            )
    from trimaran.compute.reference.backend import ReferenceBackend

    return ReferenceBackend(model)


def make_core(
    model: Model, tokenizer: Tokenizer, backend: Backend, config: EngineConfig, clock: Clock
) -> EngineCore:
    """Sizes and allocates the cache, and joins the parts.

    Raises:
        CapacityError, ConfigError: as `plan_cache`.
    """
    plan = plan_cache(
        config, model.config.context_length, backend.kv_bytes_per_token(), available_bytes()
    )
    log.info(plan.reason)
    backend.allocate_cache(plan.blocks, config.block_size)
    cache = KVCacheManager(plan.blocks, config.block_size, config.prefix_cache)
    scheduler = Scheduler(config, cache, clock)
    return EngineCore(
        model.config, tokenizer, backend, scheduler, config, plan.max_model_len, clock
    )
