"""How the memory of the KV cache is divided between groups of layers.

A group whose layers see W positions needs, for S sequences of which a step computes R tokens,

    S * (ceil(W / block_size) + 2) + ceil(R / block_size)        blocks at most,

however long the sequences are. It gets twice that, so that as much again stays cached for
prefixes to be found, but no more than sequences of full length could use, and with all groups
of its kind no more than half of the memory where other layers see all positions: those get the
rest. It never gets less than one sequence needs to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError, ConfigError
from trimaran.engine.memory import gib
from trimaran.models.layer_groups import LayerGroup


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """The sizes of a KV cache in groups.

    Attributes:
        blocks: of each group, in the order of `layer_groups`.
        max_model_len: longest sequence that is admitted.
        reason: one line for the log.
    """

    blocks: tuple[int, ...]
    max_model_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Window:
    """What a group with a window asks for, in blocks of `size` bytes."""

    window: int
    size: int
    least: int
    wanted: int


def plan_groups(
    config: EngineConfig, context: int, groups: Sequence[LayerGroup], layer_bytes: int, free: int
) -> GroupedPlan:
    """Sizes each group's blocks, within `kv_cache_bytes` or a share of `free` bytes.

    Args:
        context: the model's own context length.
        layer_bytes: of K and V of one token in one layer.
        free: bytes available now, with the weights loaded.

    Raises:
        ConfigError: max_model_len is above the model's context.
        CapacityError: not even one sequence fits; names what to change.
    """
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, above the model's context of {context};"
            " lower it"
        )
    length, block = config.max_model_len or context, layer_bytes * config.block_size
    if config.kv_cache_bytes is not None:
        budget, source = config.kv_cache_bytes, f"kv_cache_bytes {config.kv_cache_bytes}"
    else:
        budget = int(free * config.kv_memory_fraction)
        source = f"kv_memory_fraction {config.kv_memory_fraction} of {gib(free)} free"
    windows = [_window(config, group, length, block) for group in groups if group.window]
    whole = next((group for group in groups if not group.window), None)
    counts = _share(windows, budget if whole is None else budget // 2)
    left = budget - sum(n * w.size for n, w in zip(counts, windows, strict=True))
    fits, blocks = length, tuple(counts)
    if whole is not None:
        size = block * len(whole.layers)
        most = config.max_num_seqs * _blocks(config, length)
        count = min(most, max(0, left) // size)
        fits, blocks = min(length, count * config.block_size), (count, *counts)
    if left < 0 or fits < min(2, length) or (config.max_model_len or 0) > fits:
        least = ", ".join(f"{w.least} blocks for a window of {w.window}" for w in windows)
        raise CapacityError(
            f"the KV cache ({source}) doesn't hold a sequence of {length} tokens and {least};"
            " raise kv_cache_bytes or kv_memory_fraction, or lower max_model_len or"
            " max_num_batched_tokens"
        )
    parts = [
        f"{count} blocks for {len(group.layers)} layers"
        + (f" that see {group.window}" if group.window else "")
        for count, group in zip(blocks, groups, strict=True)
    ]
    used = sum(n * block * len(g.layers) for n, g in zip(blocks, groups, strict=True))
    reason = (
        f"KV cache: {' + '.join(parts)} = {gib(used)}, blocks of {config.block_size} tokens"
        f" ({source})"
    )
    return GroupedPlan(blocks, fits, reason)


def _blocks(config: EngineConfig, tokens: int) -> int:
    return -(-tokens // config.block_size)


def _window(config: EngineConfig, group: LayerGroup, length: int, block: int) -> _Window:
    rows, seats = config.max_num_batched_tokens, config.max_num_seqs
    least = _blocks(config, min(length, group.window - 1 + rows)) + 2
    most = seats * (_blocks(config, group.window) + 2) + _blocks(config, rows)
    wanted = min(2 * most, seats * (_blocks(config, length) + 2))
    return _Window(group.window, block * len(group.layers), least, max(least, wanted))


def _share(windows: Sequence[_Window], budget: int) -> list[int]:
    """Blocks of each: all that is wanted, or the same part of it, but never below the least."""
    wanted = sum(window.wanted * window.size for window in windows)
    part = min(1.0, budget / wanted) if wanted else 1.0
    return [max(window.least, int(window.wanted * part)) for window in windows]
