"""Turns the scheduler's decision into the arrays of a `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.cache.manager import KVCacheManager
from trimaran.core.request import Sequence
from trimaran.core.step_plan import StepPlan
from trimaran.schedule.selection import Selection

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)  # not frozen: that would make it three times as slow to make
class ScheduledSequence:
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
    count: int
    samples: bool
    logits: slice


class PlanBuilder:
    """Builds plans over the tables of one cache."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._single_rows: list[slice] = []

    def build(self, chosen: Selection) -> tuple[list[ScheduledSequence], StepPlan]:
        """Entries and plan of a step. Every count is positive, and there are blocks for it."""
        sequences, starts, counts = chosen.sequences, chosen.starts, chosen.counts
        rows = _single_rows(chosen) if sum(counts) == len(counts) else _many_rows(chosen)
        samples, slices, logit_rows = self._logits(chosen, rows.row_starts)
        entries = list(map(ScheduledSequence, sequences, starts, counts, samples, slices))
        return entries, self._plan(chosen, rows, logit_rows)

    def _plan(self, chosen: Selection, rows: _Rows, logit_rows: Int32) -> StepPlan:
        kv = self._kv
        size = np.int32(kv.block_size)
        contexts = chosen.ends()
        tables = kv.tables(chosen.sequences, kv.blocks_for(int(contexts.max())))
        blocks, offsets = np.divmod(rows.positions, size)
        return StepPlan(
            tokens=np.array(rows.tokens, np.int32),
            positions=rows.positions,
            slots=tables[rows.places, blocks] * size + offsets,
            row_starts=rows.row_starts,
            contexts=contexts,
            block_tables=tables,
            logit_rows=logit_rows,
            copies=np.array(kv.take_copies(), np.int32).reshape(-1, 2),
        )

    def _logits(
        self, chosen: Selection, row_starts: Int32
    ) -> tuple[list[bool], list[slice], Int32]:
        """Who samples, each one's rows in the array of logits, and the rows these are of."""
        number = len(chosen.counts)
        if row_starts[-1] == number and chosen.counts == chosen.wants:
            while len(self._single_rows) < number:
                at = len(self._single_rows)
                self._single_rows.append(slice(at, at + 1))
            return [True] * number, self._single_rows[:number], row_starts[:-1].copy()
        samples: list[bool] = []
        slices: list[slice] = []
        rows: list[int] = []
        for sequence, want, count, end in zip(
            chosen.sequences, chosen.wants, chosen.counts, row_starts[1:].tolist(), strict=True
        ):
            samples.append(count == want)
            wanted = count if scores_prompt(sequence) else int(count == want)
            slices.append(slice(len(rows), len(rows) + wanted))
            rows.extend(range(end - wanted, end))
        return samples, slices, np.array(rows, np.int32)


@dataclass(slots=True)
class _Rows:
    """The rows of a step; `places` [T] says to which sequence each belongs."""

    tokens: list[int]
    positions: Int32
    row_starts: Int32
    places: Int32


def _single_rows(chosen: Selection) -> _Rows:
    """Each sequence has one row, as in a step of decodes."""
    if chosen.counts == chosen.wants:
        tokens = [sequence.tokens[-1] for sequence in chosen.sequences]
    else:
        pairs = zip(chosen.sequences, chosen.starts, strict=True)
        tokens = [sequence.tokens[start] for sequence, start in pairs]
    row_starts = np.arange(len(tokens) + 1, dtype=np.int32)
    return _Rows(tokens, chosen.ends() - np.int32(1), row_starts, row_starts[:-1])


def _many_rows(chosen: Selection) -> _Rows:
    """Some sequence has several rows."""
    counts = np.array(chosen.counts, np.int32)
    row_starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=row_starts[1:])
    places = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.arange(row_starts[-1], dtype=np.int32)
    positions += (chosen.ends() - row_starts[1:])[places]
    tokens: list[int] = []
    for sequence, start, count in zip(chosen.sequences, chosen.starts, chosen.counts, strict=True):
        tokens += sequence.tokens[start : start + count]
    return _Rows(tokens, positions, row_starts, places)


def scores_prompt(sequence: Sequence) -> bool:
    """Whether every row of the prompt is wanted: to score the prompt, once."""
    return sequence.request.params.prompt_logprobs is not None and sequence.output_length == 0
