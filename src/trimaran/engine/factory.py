"""Puts an engine together: checkpoint, back end, cache, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.compute import native
from trimaran.compute.backend import Backend
from trimaran.core.clock import Clock, SystemClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BackendError, BuildError, ConfigError, TrimaranError
from trimaran.engine.block_size import choose_block_size
from trimaran.engine.builds import BuildStore, LoadedBuild, load_build, save_build
from trimaran.engine.core import EngineCore
from trimaran.engine.group_memory import GroupedPlan, plan_groups
from trimaran.engine.layer_windows import check_groups, make_grouped_cache
from trimaran.engine.lengths import LengthRecord
from trimaran.engine.memory import CachePlan, available_bytes, plan_cache
from trimaran.engine.tiers import CacheParts, open_tiers
from trimaran.models.chat_template import ChatTemplate
from trimaran.models.config import ModelConfig
from trimaran.models.model import Model
from trimaran.models.source import Identity, identity
from trimaran.models.store import resolve
from trimaran.models.tokenizer import Tokenizer
from trimaran.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from trimaran.compute.native.built import BuiltModel
    from trimaran.models.load import Checkpoint

SLOW_SECONDS = 0.25
"""A model whose weights take longer to pack is built for the next start."""

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
    loaded = load_model(path, config, phases.done)
    record = LengthRecord(path) if config.block_size == 0 else None
    if record is not None:
        config = _with_block_size(config, loaded, record)
    core = make_core(loaded, config, clock or SystemClock())
    core.record = record
    phases.done("allocate cache")
    return LoadedEngine(core, path, loaded.chat_template, phases)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in a back end."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    backend: Backend


def load_model(path: Path, config: EngineConfig, phase_done: Callable[[str], None]) -> LoadedModel:
    """A model from a build, from the cached build of a checkpoint, or from a checkpoint.

    Args:
        path: a build's folder, or as `load_checkpoint` takes it.
        phase_done: called with the name of what was done since the last call.

    Raises:
        TrimaranError: of the class that names the trouble.
    """
    if native.is_build(path):
        return _load_build(path, config, phase_done)
    store = BuildStore() if config.build_cache and choose_backend(config) == "native" else None
    if store is None:
        return _load_checkpoint(path, config, phase_done)[0]
    from trimaran.compute.native.built import choose_isa

    isa = choose_isa(config.isa)
    rebuild = store.has(path, config.weights, isa)
    found = store.load(path, config.weights, isa, config.threads)
    if found is not None:
        phase_done("read cached build")
        return _start_build(found, config, config.kv_format(), phase_done)
    seen = identity(path)
    loaded, checkpoint, seconds = _load_checkpoint(path, config, phase_done)
    if rebuild or seconds > SLOW_SECONDS:
        _keep(store, path, loaded.backend, checkpoint, seen)
        phase_done("keep build")
    return loaded


def _load_checkpoint(
    path: Path, config: EngineConfig, phase_done: Callable[[str], None]
) -> tuple[LoadedModel, Checkpoint, float]:
    """(the model, what it was made from, seconds that packing took)."""
    from trimaran.models.load import load_checkpoint

    checkpoint = load_checkpoint(path)
    phase_done("read checkpoint")
    tokenizer = checkpoint.tokenizer()
    phase_done("build tokenizer")
    begin = time.perf_counter()
    backend = make_backend(checkpoint.model, config)
    seconds = time.perf_counter() - begin
    phase_done("pack weights")
    loaded = LoadedModel(checkpoint.config, tokenizer, checkpoint.chat_template(), backend)
    return loaded, checkpoint, seconds


def _keep(
    store: BuildStore, path: Path, backend: Backend, checkpoint: Checkpoint, seen: Identity
) -> None:
    """Keeps what was packed, or says why not: a start never fails for it."""
    from trimaran.compute.native.backend import NativeBackend

    assert isinstance(backend, NativeBackend)
    try:
        place = store.save(path, backend.built, checkpoint, seen)
        log.info("the build is kept in %s, for faster starts", place)
    except TrimaranError as error:
        log.info("the build isn't kept: %s", error)


def _load_build(path: Path, config: EngineConfig, phase_done: Callable[[str], None]) -> LoadedModel:
    if choose_backend(config) != "native":
        raise BackendError(
            f"{path} is built for the native kernels; give the model that it was built from, or"
            " another backend"
        )
    loaded = load_build(path, config.weights, config.isa, config.kv, config.threads)
    phase_done("read build")
    return _start_build(loaded, config, config.kv_format(loaded.built.kv), phase_done)


def _start_build(
    build: LoadedBuild, config: EngineConfig, kv: str, phase_done: Callable[[str], None]
) -> LoadedModel:
    from trimaran.compute.native.backend import NativeBackend

    built = build.built
    backend = NativeBackend(
        built,
        kv=kv,
        activations=config.activations,
        threads=config.threads,
        max_rows=config.step_rows(built.config.context_length),
    )
    phase_done("start threads")
    return LoadedModel(built.config, build.tokenizer, build.chat_template, backend)


def build_model(
    model: str | Path,
    config: EngineConfig,
    output: Path | None,
    *,
    phases: Phases | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, BuiltModel]:
    """Builds a model for later starts; (folder of the build, what is in it).

    Args:
        config: of which `weights`, `kv`, `isa` and `threads` count; `kv` is only for a
            folder, whose starts take it.
        output: a new folder, or that of an older build; None is the cache, where every later
            start of the model with the same options finds it.

    Raises:
        TrimaranError: of the class that names the trouble.
    """
    if output is None and config.kv != "auto":
        raise ConfigError(
            f"kv is '{config.kv}', but a build in the cache serves starts with any kv; leave the"
            " option to them, or give a folder for the build"
        )
    phases = phases or Phases()
    path = resolve(model, progress=progress)
    phases.done("find model")
    if native.is_build(path):
        raise BuildError(f"{path} is a build already; give the model that it was built from")
    if choose_backend(config) != "native":
        raise BackendError("only models for the native kernels are built; leave backend out")
    from trimaran.compute.native.built import build
    from trimaran.models.load import load_checkpoint

    seen = identity(path)
    checkpoint = load_checkpoint(path)
    phases.done("read checkpoint")
    checkpoint.tokenizer()  # an unsound one is known now, not when the build is used
    checkpoint.chat_template()
    phases.done("check tokenizer")
    built = build(checkpoint.model, config.weights, config.isa, config.threads)
    if config.kv != "auto":
        built = replace(built, kv=config.kv)
    phases.done("pack weights")
    if output is None:
        place = BuildStore().save(path, built, checkpoint, seen)
    else:
        place = save_build(output, built, checkpoint)
    phases.done("write build")
    return place, built


def choose_backend(config: EngineConfig) -> str:
    """ "native" or "reference", as asked for and as can be had.

    Raises:
        BackendError: it can't run here; says why.
    """
    name = config.backend
    if name == "auto":
        name = "native" if native.is_available() else "reference"
    if name == "native" and not native.is_available():
        raise BackendError(
            f"backend is 'native', but its kernels are not available:"
            f" {native.unavailable_reason()}; install a C++ compiler and reinstall, or use"
            f" backend='reference'"
        )
    return name


# Options that the reference back end hasn't, with what they are without it.
_NATIVE_ONLY = (("isa", "auto"), ("weights", "as-is"), ("kv", "auto"), ("activations", "auto"))


def make_backend(model: Model, config: EngineConfig) -> Backend:
    """The back end that the configuration asks for.

    Raises:
        BackendError: it can't run here; says why.
    """
    if choose_backend(config) == "native":
        from trimaran.compute.native.backend import NativeBackend

        return NativeBackend(
            model,
            weights=config.weights,
            kv=config.kv_format(),
            activations=config.activations,
            isa=config.isa,
            threads=config.threads,
            max_rows=config.step_rows(model.config.context_length),
        )
    if config.backend == "auto":
        log.warning(
            "the native kernels are not available (%s); the reference back end is many times"
            " slower",
            native.unavailable_reason(),
        )
    for option, default in _NATIVE_ONLY:
        if getattr(config, option) != default:
            raise BackendError(
                f"{option} is '{getattr(config, option)}', which the reference back end doesn't"
                f" have (it computes in float32); leave it at '{default}' or use the native one"
            )
    from trimaran.compute.reference.backend import ReferenceBackend

    return ReferenceBackend(model)


def _with_block_size(
    config: EngineConfig, model: LoadedModel, record: LengthRecord
) -> EngineConfig:
    """The options with a block size in place of "auto"."""
    windows = [group.window for group in model.backend.layer_groups() if group.window]
    chosen = choose_block_size(record.read(), min(windows, default=0))
    log.info(chosen.reason)
    return replace(config, block_size=chosen.tokens)


def make_core(model: LoadedModel, config: EngineConfig, clock: Clock) -> EngineCore:
    """Sizes and allocates the cache, and joins the parts.

    Raises:
        CapacityError, ConfigError: as `plan_cache`.
    """
    backend, context = model.backend, model.config.context_length
    groups = backend.layer_groups()
    plan: CachePlan | GroupedPlan
    if len(groups) == 1 and not groups[0].window:
        plan = plan_cache(config, context, backend.kv_bytes_per_token(), available_bytes())
        backend.allocate_cache(plan.blocks, config.block_size)
        parts = open_tiers(backend, config, plan.blocks, clock)
    else:
        check_groups(config)
        layer_bytes = backend.kv_bytes_per_token() // model.config.num_layers
        plan = plan_groups(config, context, groups, layer_bytes, available_bytes())
        backend.allocate_cache(plan.blocks, config.block_size)
        parts = CacheParts(make_grouped_cache(config, groups, plan))
    log.info(plan.reason)
    scheduler = Scheduler(
        config, parts.kv, clock, max_model_len=plan.max_model_len, tiers=parts.tiers
    )
    core = EngineCore(
        model.config,
        model.tokenizer,
        model.backend,
        scheduler,
        config,
        plan.max_model_len,
        clock,
    )
    parts.attach(core)
    return core
