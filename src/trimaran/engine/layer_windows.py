"""The KV cache of models whose layers see windows of positions, and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trimaran.cache.grouped import GroupedKVCache
from trimaran.cache.indices import make_index
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError
from trimaran.engine.group_memory import GroupedPlan
from trimaran.models.layer_groups import LayerGroup

_ONE_KIND = "it knows blocks of layers that see all positions"
_REFUSED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "capacity": (lambda value: value == "no-evict", "what it promises counts blocks of one kind"),
    "kv_host_bytes": (bool, _ONE_KIND),
    "kv_disk_path": (bool, _ONE_KIND),
    "kv_events": (bool, _ONE_KIND),
}
"""By option: which values don't go with windows, and why."""


def check_groups(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: an option doesn't go with layers that see windows of positions.
    """
    for option, (refused, why) in _REFUSED.items():
        value = getattr(config, option, None)
        if refused(value):
            raise ConfigError(
                f"{option} is {value!r}, which doesn't go with this model, whose layers see"
                f" windows of positions: {why}; leave {option} out"
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
