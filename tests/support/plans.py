"""Step plans for tests of back ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trimaran.compute.backend import Backend
from trimaran.core.step_plan import Float32, Int32, StepPlan


def int32(values: object) -> Int32:
    return np.ascontiguousarray(np.array(values), np.int32)


@dataclass
class Line:
    """One sequence: its tokens, the blocks it holds, how many tokens are computed."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[Float32] = field(default_factory=list)  # one a token, once computed


def make_plan(
    chunks: Sequence[tuple[Line, int]],
    block_size: int,
    every_row: bool = True,
    copies: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """The plan that computes the next `count` tokens of each line."""
    width = max(len(line.blocks) for line, _ in chunks)
    tokens, positions, slots, starts, contexts, tables = [], [], [], [0], [], []
    for line, count in chunks:
        for position in range(line.computed, line.computed + count):
            tokens.append(line.tokens[position])
            positions.append(position)
            block = line.blocks[position // block_size]
            slots.append(block * block_size + position % block_size)
        starts.append(len(tokens))
        contexts.append(line.computed + count)
        tables.append(line.blocks + [-1] * (width - len(line.blocks)))
    wanted = range(len(tokens)) if every_row else [end - 1 for end in starts[1:]]
    return StepPlan(
        int32(tokens),
        int32(positions),
        int32(slots),
        int32(starts),
        int32(contexts),
        int32(tables),
        int32(wanted),
        int32(copies).reshape(-1, 2),
    )


def step(backend: Backend, chunks: Sequence[tuple[Line, int]], block_size: int) -> None:
    """Computes the next `count` tokens of each line and keeps the logits of every row."""
    logits = backend.run(make_plan(chunks, block_size)).copy()
    row = 0
    for line, count in chunks:
        line.logits += list(logits[row : row + count])
        line.computed += count
        row += count
