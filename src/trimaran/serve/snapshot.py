"""What an engine does at this moment, as plain JSON values."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from trimaran.core.request import Sequence
from trimaran.engine.core import EngineCore
from trimaran.engine.encoder_core import EncoderCore

LISTED = 128
"""Sequences that are told one by one, of those that run and of those that wait."""
CELLS = 1024
"""Cells of the block map, at most; each stands for as many blocks."""


def snapshot(core: EngineCore | EncoderCore, since: int) -> dict[str, Any]:
    """The state between two steps; called on the engine's thread.

    Args:
        since: number of the last step that is known already.
    """
    scheduler = core.scheduler
    usage = scheduler.kv.usage()
    now = core.clock.now()
    steps = core.steps.since(since)
    return {
        "now": now,
        "step": core.metrics.steps,
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "requests": {
            "running": [_told(each, now) for each in islice(scheduler.running(), LISTED)],
            "waiting": [_told(each, now) for each in islice(scheduler.waiting(), LISTED)],
        },
        "blocks": {
            "total": usage.total,
            "free": usage.free,
            "held": usage.held,
            "cached": usage.cached,
            "size": scheduler.kv.block_size,
        },
        "prefix_cache": {"queried": usage.queried_tokens, "hit": usage.hit_tokens},
        "generated_tokens": core.metrics.generated_tokens,
        "steps": [record._asdict() for record in steps],
    }


def block_map(core: EngineCore | EncoderCore) -> dict[str, Any]:
    """The KV blocks as a row of cells; called on the engine's thread.

    Returns:
        `blocks_per_cell`, and `cells`: for each cell how many of its blocks are cached, held by
        one sequence, and shared by several.
    """
    states = core.scheduler.kv.pool.states()
    size = max(1, -(-len(states) // CELLS))
    padded = np.zeros(-(-len(states) // size) * size, np.uint8)
    padded[: len(states)] = states
    cells = padded.reshape(-1, size)
    counts = [(cells == state).sum(axis=1).tolist() for state in (1, 2, 3)]
    return {"blocks_per_cell": size, "cells": list(zip(*counts, strict=True))}


def _told(sequence: Sequence, now: float) -> dict[str, Any]:
    return {
        "id": sequence.id,
        "age": round(now - sequence.request.arrival, 3),
        "prompt_tokens": sequence.prompt_length,
        "computed_tokens": sequence.computed,
        "output_tokens": sequence.output_length,
        "cached_tokens": sequence.cached,
        "preemptions": sequence.preemptions,
        "priority": sequence.request.priority,
    }
