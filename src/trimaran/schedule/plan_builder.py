"""Turns the scheduler's decision into the arrays of a `StepPlan`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimaran.cache.manager import KVCacheManager
from trimaran.core.request import Sequence
from trimaran.core.step_plan import StepPlan

Int32 = npt.NDArray[np.int32]


class ScheduledSequence(NamedTuple):
    """One sequence's part in a step.

    Attributes:
        start: position of its first row.
        count: rows.
        samples: the last row is that of the last known token: a token is drawn from it.
        logits: its rows in the array of logits: every row of a prompt whose tokens are to be
            scored, else the last row where `samples`, else none.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    samples: bool
    logits: slice


_entry = partial(tuple.__new__, ScheduledSequence)  # without the checks of keyword arguments


class PlanBuilder:
    """Builds plans over the tables of one cache."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._single_rows: list[slice] = []

    def build(
        self, sequences: list[Sequence], counts: list[int]
    ) -> tuple[list[ScheduledSequence], StepPlan]:
        """Entries and plan of a step in which `sequences` compute `counts` (> 0) tokens;
        they must have blocks for them."""
        starts = [sequence.computed for sequence in sequences]
        first = np.array(starts, np.int32)
        if max(counts) == 1:
            positions, row_starts = first, np.arange(len(counts) + 1, dtype=np.int32)
            places: Int32 | None = None
            tokens = [s.tokens[start] for s, start in zip(sequences, starts, strict=True)]
        else:
            row_counts = np.array(counts, np.int32)
            row_starts = np.zeros(len(counts) + 1, np.int32)
            np.cumsum(row_counts, out=row_starts[1:])
            places = np.repeat(np.arange(len(counts), dtype=np.int32), row_counts)
            positions = np.arange(row_starts[-1], dtype=np.int32)
            positions += (first - row_starts[:-1])[places]
            tokens = []
            for sequence, start, count in zip(sequences, starts, counts, strict=True):
                tokens += sequence.tokens[start : start + count]
        samples = [
            len(s.tokens) == start + count
            for s, start, count in zip(sequences, starts, counts, strict=True)
        ]
        logits, logit_rows = self._logits(sequences, counts, samples, row_starts)
        contexts = positions[row_starts[1:] - 1] + np.int32(1)
        plan = self._plan(sequences, tokens, positions, row_starts, places, contexts, logit_rows)
        return list(map(_entry, zip(sequences, starts, counts, samples, logits, strict=True))), plan

    def _plan(
        self,
        sequences: list[Sequence],
        tokens: list[int],
        positions: Int32,
        row_starts: Int32,
        places: Int32 | None,
        contexts: Int32,
        logit_rows: Int32,
    ) -> StepPlan:
        kv, size = self._kv, self._kv.block_size
        tables = kv.tables(sequences, kv.blocks_for(int(contexts.max())))
        blocks, offsets = np.divmod(positions, np.int32(size))
        if places is None:
            places = row_starts[:-1]  # one row a sequence
        return StepPlan(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            slots=tables[places, blocks] * np.int32(size) + offsets,
            row_starts=row_starts,
            contexts=contexts,
            block_tables=tables,
            logit_rows=logit_rows,
            copies=np.array(kv.take_copies(), np.int32).reshape(-1, 2),
        )

    def _logits(
        self,
        sequences: list[Sequence],
        counts: list[int],
        samples: list[bool],
        row_starts: Int32,
    ) -> tuple[list[slice], Int32]:
        """Each sequence's rows in the array of logits, and the rows these are of."""
        number = len(counts)
        if len(row_starts) - 1 == row_starts[-1] and all(samples):  # one row each, all wanted
            while len(self._single_rows) < number:
                at = len(self._single_rows)
                self._single_rows.append(slice(at, at + 1))
            return self._single_rows[:number], row_starts[:-1].copy()
        slices: list[slice] = []
        rows: list[int] = []
        ends = row_starts[1:].tolist()
        for sequence, count, sampled, end in zip(sequences, counts, samples, ends, strict=True):
            wanted = count if scores_prompt(sequence) else int(sampled)
            slices.append(slice(len(rows), len(rows) + wanted))
            rows.extend(range(end - wanted, end))
        return slices, np.array(rows, np.int32)


def scores_prompt(sequence: Sequence) -> bool:
    """Whether every row of the prompt is wanted: to score the prompt, once."""
    return sequence.request.params.prompt_logprobs is not None and sequence.output_length == 0
