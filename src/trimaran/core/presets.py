"""Combinations of policies that users know by the engine that made them known.

What is said here of an engine is its policy, not its speed: each preset runs on the same
kernels, so that the policies can be compared and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.core.errors import ConfigError, nearest

PRESETS: dict[str, dict[str, Any]] = {
    # vLLM V1: those that run first, prompts in chunks of what is left of the budget; blocks
    # by hash; preemption by recomputing.
    "vllm": {
        "order": "fcfs",
        "chunking": "fixed",
        "capacity": "max-utilization",
        "index": "hash",
        "block_size": 16,
        "prefix_cache": True,
    },
    # SGLang: a radix tree, hits to the token, and the order that follows them; prompts first.
    "sglang": {
        "order": "longest-prefix",
        "chunking": "whole",
        "capacity": "max-utilization",
        "index": "radix",
        "block_size": 16,
        "prefix_cache": True,
    },
    # TensorRT-LLM: in-flight batching, GUARANTEED_NO_EVICT, reuse with copies of partial
    # blocks, 32 tokens a block.
    "trtllm": {
        "order": "fcfs",
        "chunking": "fixed",
        "capacity": "no-evict",
        "index": "radix",
        "block_size": 32,
        "prefix_cache": True,
    },
    # FasterTransformer: a batch is served until its last request has ended; memory for the
    # longest output from the start; nothing is reused.
    "fastertransformer": {
        "order": "fcfs",
        "chunking": "static",
        "capacity": "no-evict",
        "index": "hash",
        "block_size": 32,
        "prefix_cache": False,
    },
}


def expanded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those of their `preset` where they say nothing themselves.

    Raises:
        ConfigError: there is no such preset.
    """
    name = options.get("preset")
    if name is None:
        return dict(options)
    if name not in PRESETS:
        tail = nearest(name, PRESETS) if isinstance(name, str) else ""
        raise ConfigError(f"preset is {name!r}; give one of {', '.join(PRESETS)}.{tail}")
    return {**PRESETS[name], **options}
