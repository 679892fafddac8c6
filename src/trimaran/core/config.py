"""The options of an engine: few, each with a default that is right for most."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from trimaran.core.compatibility import check_compatible
from trimaran.core.errors import ConfigError, nearest
from trimaran.core.presets import expanded

_Config = TypeVar("_Config")

BACKENDS = ("auto", "native", "reference")
WEIGHTS = ("as-is", "bf16", "int8", "int4")
KV_FORMATS = ("bf16", "int8")
KV_CHOICES = ("auto", *KV_FORMATS)
ACTIVATIONS = ("auto", "int8")
ISAS = ("auto", "amx", "avx512", "avx2", "portable")
BLOCK_SIZES = (0, 4, 8, 16, 32)
"""0 is "auto"."""
INDICES = ("hash", "radix")
ORDERS = ("fcfs", "priority", "longest-prefix", "weighted-shortest")
CHUNKINGS = ("static", "whole", "fixed", "fine")
CAPACITIES = ("max-utilization", "no-evict")


def _with_preset(cls: type[_Config]) -> type[_Config]:
    """Makes the options that a preset names the defaults of those that weren't given."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self: Any, **options: Any) -> None:
        made(self, **expanded(options))

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_with_preset
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Attributes:
        preset: a combination of index, order, chunking, capacity and block size that is known
            from another engine: "vllm", "sglang", "trtllm" or "fastertransformer"; each of
            these that is given beside it wins. None is none.
        backend: "native" (C++), "reference" (numpy, slow), or "auto": native where it was
            compiled, else reference with a warning.
        weights: how linear weights are held: "as-is" (the file's own precision), "bf16",
            "int8" or "int4" (rounded to nearest, a scale and a minimum per 32 inputs; of
            int4, embeddings and output head are held in int8).
        kv: how keys and values are held: "bf16", "int8" (a scale for each token and KV
            head), which takes about half the memory, or "auto": what a build says, else
            bf16.
        activations: what linear layers with weights of 8 bits and less round their input to:
            "auto" (12 bits a row; bf16 with AMX, where it is the faster) or "int8" (8 bits and
            a scale for each 32 inputs, as llama.cpp does: less exact, and a third less
            arithmetic; with AMX the same as "auto").
        isa: instruction set of the native kernels; "auto" takes the best the CPU has.
        build_cache: use the cached build of a model, and keep one where packing its weights
            took longer than 0.25 seconds.
        threads: compute threads; 0 takes the CPUs this process may use, by its affinity
            mask and its cgroups' quota.
        max_model_len: longest prompt + output in tokens; None takes the model's own, or
            less where the KV cache could not hold one such sequence.
        block_size: tokens in a KV block, 4, 8, 16 or 32; "auto" (or 0) takes the largest that
            wastes little with the lengths that the model's sequences had before.
        kv_cache_bytes: memory for the KV cache; None sizes it by `kv_memory_fraction`.
        kv_memory_fraction: share of the memory that is free after the weights are loaded
            which the KV cache may take.
        kv_host_bytes: memory for copies of KV blocks that the KV cache may give up, and for
            blocks of preempted sequences; 0 is none.
        kv_disk_path: a folder where KV blocks that were used twice are kept over restarts;
            engines on one machine can share it. None is none.
        kv_disk_bytes: what the blocks in `kv_disk_path` may take, those of all engines
            together.
        kv_events: where to publish which KV blocks are stored and removed, as vLLM does: a
            ZMQ endpoint as in "tcp://*:5557", then, if wanted, ",replay=tcp://*:5558" and
            ",topic=NAME". None is nowhere.
        max_num_seqs: sequences in one step, at most.
        max_num_batched_tokens: rows in one step, at most; longer prompts are chunked, or
            come alone where they aren't.
        prefix_cache: reuse the KV of equal prompt prefixes.
        index: how equal prefixes are found: "hash" (in full blocks) or "radix" (to the
            token; the last, partly equal block is copied).
        order: which waiting request is next: "fcfs" (first come, first served), "priority"
            (the request's, lowest first; ten seconds of waiting make up for a level),
            "longest-prefix" (of which most is cached) or "weighted-shortest" (by predicted
            time for the weight of its SLO class).
        chunking: how a prompt is spread over steps: "fixed" (up to chunk_size tokens in
            each), "fine" (so many that the step keeps the TPOT target of the SLO classes of
            those that decode in it), "whole" (in one step, before those that decode) or
            "static" (whole, in a batch that is served until the last of it has ended).
        chunk_size: tokens of a prompt in a step, at most, with fixed chunking; None: as many
            as the step has.
        capacity: who may hold blocks: "max-utilization" (who fits now; preempt and recompute
            when blocks run out) or "no-evict" (whose longest output is sure to fit).
        max_waiting: requests that may wait for one of the max_num_seqs seats; one more is
            refused as busy, with a hint when to try again. None is no limit.
        step_timeout: seconds after which a step that hasn't returned fails its requests, and
            a scheduler that gets nowhere those that it doesn't serve; None waits for ever.
        seed: from which requests without a seed of their own draw theirs.
    """

    preset: str | None = None
    backend: str = "auto"
    weights: str = "as-is"
    kv: str = "auto"
    activations: str = "auto"
    isa: str = "auto"
    build_cache: bool = True
    threads: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float = 0.5
    kv_host_bytes: int = 0
    kv_disk_path: str | None = None
    kv_disk_bytes: int = 8 << 30
    kv_events: str | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefix_cache: bool = True
    index: str = "hash"
    order: str = "fcfs"
    chunking: str = "fixed"
    chunk_size: int | None = None
    capacity: str = "max-utilization"
    max_waiting: int | None = None
    step_timeout: float | None = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("kv", self.kv, KV_CHOICES)
        _one_of("activations", self.activations, ACTIVATIONS)
        _one_of("isa", self.isa, ISAS)
        if self.block_size == "auto":  # type: ignore[comparison-overlap]
            object.__setattr__(self, "block_size", 0)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("index", self.index, INDICES)
        _one_of("order", self.order, ORDERS)
        _one_of("chunking", self.chunking, CHUNKINGS)
        _one_of("capacity", self.capacity, CAPACITIES)
        _in_range("threads", self.threads, 0, 1024)
        _in_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _in_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("build_cache", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give True or False")
        if self.max_model_len is not None:
            _in_range("max_model_len", self.max_model_len, 1, 1 << 24)
        if self.chunk_size is not None:
            _in_range("chunk_size", self.chunk_size, 1, 1 << 20)
        if self.max_waiting is not None:
            _in_range("max_waiting", self.max_waiting, 0, 1 << 30)
        _check_seconds("step_timeout", self.step_timeout)
        if self.kv_cache_bytes is not None:
            _in_range("kv_cache_bytes", self.kv_cache_bytes, 1, 1 << 50)
        _in_range("kv_host_bytes", self.kv_host_bytes, 0, 1 << 50)
        _in_range("kv_disk_bytes", self.kv_disk_bytes, 1, 1 << 60)
        for name in ("kv_disk_path", "kv_events"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"{name} is {text!r}; give a text that isn't empty, or None")
        if not 0.0 < self.kv_memory_fraction <= 0.95:
            raise ConfigError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; give more than 0, at most 0.95"
            )
        check_compatible(self)

    def kv_format(self, of_build: str | None = None) -> str:
        """One of `KV_FORMATS`: what "auto" means.

        Args:
            of_build: that of the build that is started, if it has one.
        """
        return of_build or "bf16" if self.kv == "auto" else self.kv

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> EngineConfig:
        """A config from keyword options.

        Raises:
            ConfigError: an unknown option (with the nearest known one) or a bad value.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option '{name}'.{nearest(name, known)}")
        return cls(**options)

    def step_rows(self, context: int) -> int:
        """Rows a step may have, with sequences of up to `context` tokens."""
        if self.chunking in ("whole", "static"):
            return max(self.max_num_batched_tokens, min(context, self.max_model_len or context))
        return self.max_num_batched_tokens


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(str(choice) for choice in allowed)
        tail = nearest(value, map(str, allowed)) if isinstance(value, str) else ""
        raise ConfigError(f"{name} is {value!r}; give one of {listed}.{tail}")


def _in_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; give a whole number from {low} to {high}")


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1e6:
        raise ConfigError(f"{name} is {value!r}; give 0.01 to 1000000 seconds, or None")
