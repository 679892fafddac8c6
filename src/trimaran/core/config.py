"""The options of an engine: few, each with a default that is right for most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trimaran.core.errors import ConfigError, nearest

BACKENDS = ("auto", "native", "reference")
WEIGHTS = ("as-is", "bf16", "int8", "int4")
KV_FORMATS = ("bf16", "int8")
ISAS = ("auto", "amx", "avx512", "avx2", "portable")
BLOCK_SIZES = (4, 8, 16, 32)
ORDERS = ("fcfs",)
CAPACITIES = ("max-utilization",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Attributes:
        backend: "native" (C++), "reference" (numpy, slow), or "auto": native where it was
            compiled, else reference with a warning.
        weights: how linear weights are held: "as-is" (the file's own precision), "bf16",
            "int8" or "int4" (rounded to nearest, a scale and a minimum per 32 inputs; of
            int4, embeddings and output head are held in int8).
        kv: how keys and values are held: "bf16", or "int8" (a scale for each token and KV
            head), which takes about half the memory.
        isa: instruction set of the native kernels; "auto" takes the best the CPU has.
        build_cache: use the cached build of a model, and keep one where packing its weights
            took longer than 0.25 seconds.
        threads: compute threads; 0 takes the CPUs this process may use, by its affinity
            mask and its cgroups' quota.
        max_model_len: longest prompt + output in tokens; None takes the model's own, or
            less where the KV cache could not hold one such sequence.
        block_size: tokens in a KV block.
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
        max_num_batched_tokens: rows in one step, at most; longer prompts are chunked.
        prefix_cache: reuse the KV of equal prompt prefixes.
        order: which waiting request is next: "fcfs".
        capacity: who may hold blocks: "max-utilization" (preempt and recompute).
        seed: from which requests without a seed of their own draw theirs.
    """

    backend: str = "auto"
    weights: str = "as-is"
    kv: str = "bf16"
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
    order: str = "fcfs"
    capacity: str = "max-utilization"
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("kv", self.kv, KV_FORMATS)
        _one_of("isa", self.isa, ISAS)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("order", self.order, ORDERS)
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
        if self.kv_cache_bytes is not None:
            _in_range("kv_cache_bytes", self.kv_cache_bytes, 1, 1 << 50)
        _in_range("kv_host_bytes", self.kv_host_bytes, 0, 1 << 50)
        _in_range("kv_disk_bytes", self.kv_disk_bytes, 1, 1 << 60)
        for name in ("kv_disk_path", "kv_events"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"{name} is {text!r}; give a text that isn't empty, or None")
        for name in ("kv_host_bytes", "kv_disk_path", "kv_events"):
            if getattr(self, name) and not self.prefix_cache:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but prefix_cache is off, so no block has a"
                    f" name; leave {name} out, or prefix_cache on"
                )
        if not 0.0 < self.kv_memory_fraction <= 0.95:
            raise ConfigError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; give more than 0, at most 0.95"
            )

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


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(str(choice) for choice in allowed)
        tail = nearest(value, map(str, allowed)) if isinstance(value, str) else ""
        raise ConfigError(f"{name} is {value!r}; give one of {listed}.{tail}")


def _in_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; give a whole number from {low} to {high}")
