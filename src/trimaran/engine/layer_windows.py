"""The KV cache of models whose layers see windows of positions, and what goes with it."""

from __future__ import annotations

from collections.abc import Sequence

from trimaran.cache.grouped import GroupedKVCache
from trimaran.cache.indices import make_index
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError
from trimaran.engine.group_memory import GroupedPlan
from trimaran.models.layer_groups import LayerGroup

_REFUSED = {
    "capacity": ("no-evict", "what it promises counts blocks of layers that see all positions"),
}
"""By option: the value that doesn't go with windows, and why."""


def check_groups(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: an option doesn't go with layers that see windows of positions.
    """
    for option, (value, why) in _REFUSED.items():
        if getattr(config, option) == value:
            raise ConfigError(
                f"{option} is '{value}', which doesn't go with this model, whose layers see"
                f" windows of positions: {why}; give another {option}"
            )


def make_grouped_cache(
    config: EngineConfig, groups: Sequence[LayerGroup], plan: GroupedPlan
) -> GroupedKVCache:
    """The bookkeeping of the cache that `plan` sizes."""
    sized = list(zip(groups, plan.blocks, strict=True))
    return GroupedKVCache(
        sum(count for group, count in sized if not group.window),
        [(group.window, count) for group, count in sized if group.window],
        config.block_size,
        max_tokens=config.max_num_seqs * plan.max_model_len,
        most_rows=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
        index=make_index(config.index, config.block_size) if config.prefix_cache else None,
    )
