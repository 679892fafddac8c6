"""How large the KV cache is, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError, ConfigError


def available_bytes() -> int:
    """Memory this process could still take: what the kernel calls available, or what is
    left below the control group's limit where that is less."""
    free = _meminfo_available()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the KV cache.

    Attributes:
        blocks: of `block_size` tokens each.
        max_model_len: longest sequence that is admitted; fits the cache.
        reason: one line for the log: the numbers it came from.
    """

    blocks: int
    max_model_len: int
    reason: str


def plan_cache(config: EngineConfig, context: int, bytes_per_token: int, free: int) -> CachePlan:
    """Sizes the cache to `kv_cache_bytes`, or to a share of `free` bytes but never to more
    than `max_num_seqs` sequences of full length could use.

    Args:
        context: the model's own context length.
        bytes_per_token: of K and V in all layers.
        free: bytes available now, with the weights loaded.

    Raises:
        ConfigError: max_model_len is above the model's context.
        CapacityError: not even one sequence of max_model_len fits; names what to change.
    """
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, above the model's context of {context};"
            " lower it"
        )
    block_bytes = bytes_per_token * config.block_size
    wanted = config.max_model_len or context
    if config.kv_cache_bytes is not None:
        blocks = config.kv_cache_bytes // block_bytes
        source = f"kv_cache_bytes {config.kv_cache_bytes}"
    else:
        most = config.max_num_seqs * -(-wanted // config.block_size)
        share = int(free * config.kv_memory_fraction)
        blocks = min(most, share // block_bytes)
        source = f"kv_memory_fraction {config.kv_memory_fraction} of {gib(free)} free"
        if blocks == most:
            source = f"{config.max_num_seqs} sequences of {wanted} tokens, within {source}"
    tokens = blocks * config.block_size
    if config.max_model_len is not None and tokens < wanted:
        raise CapacityError(
            f"the KV cache holds {tokens} tokens ({source}, {bytes_per_token} bytes a token),"
            f" fewer than max_model_len {wanted}; raise kv_cache_bytes or kv_memory_fraction,"
            f" or lower max_model_len"
        )
    if tokens < 2:
        raise CapacityError(
            f"the KV cache would hold {tokens} tokens ({source}, {block_bytes} bytes a block of"
            f" {config.block_size}); raise kv_cache_bytes or kv_memory_fraction"
        )
    reason = (
        f"KV cache: {blocks} blocks of {config.block_size} tokens"
        f" = {tokens} tokens, {gib(blocks * block_bytes)} ({source})"
    )
    return CachePlan(blocks, min(wanted, tokens), reason)


def gib(size: int) -> str:
    """For people."""
    return f"{size / 2**30:.2f} GiB"
