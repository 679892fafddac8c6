"""Turns the scheduler's decision into the arrays of a `StepPlan`."""

from __future__ import annotations

from operator import getitem

import numpy as np
import numpy.typing as npt

from trimaran.cache.manager import KVCacheManager
from trimaran.core.request import Sequence
from trimaran.core.step_plan import GroupTables, StepPlan
from trimaran.schedule.running import packed
from trimaran.schedule.selection import Selection
from trimaran.schedule.step import ScheduledStep

Int32 = npt.NDArray[np.int32]

_NO_COPIES = np.zeros((0, 2), np.int32)


class PlanBuilder:
    """Builds plans over the tables of one cache."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._counting: Int32 = np.arange(2, dtype=np.int32)
        self._ones: Int32 = np.ones(1, np.int32)

    def build(self, chosen: Selection, lasts: Int32 | None = None) -> ScheduledStep:
        """A step with its plan. Every count is positive, and there are blocks for it.

        Args:
            lasts: the sequences' last tokens, where `chosen.decodes` and the caller has them.
        """
        number = len(chosen)
        ends = chosen.ends()
        if chosen.decodes:
            starts, ones = self._count(number)
            row_starts, places, positions = starts, starts[:-1], chosen.starts
            if lasts is None:
                lasts = np.array([sequence.tokens[-1] for sequence in chosen.sequences], np.int32)
            return ScheduledStep(
                chosen, self._plan(lasts, positions, row_starts, places, ends, chosen, places),
                starts[1:], ones, decode_tokens=number,
            )  # fmt: skip
        rows = int(chosen.counts.sum())
        row_starts = np.zeros(number + 1, np.int32)
        np.cumsum(chosen.counts, out=row_starts[1:])
        places = np.repeat(np.arange(number, dtype=np.int32), chosen.counts)
        positions = np.arange(rows, dtype=np.int32)
        positions += (ends - row_starts[1:])[places]
        wanted, logit_rows, scoring = _wanted(chosen, row_starts)
        plan = self._plan(
            _row_tokens(chosen, row_starts), positions, row_starts, places, ends,
            chosen, logit_rows,
        )  # fmt: skip
        decodes = int((chosen.wants == 1).sum())
        return ScheduledStep(
            chosen, plan, np.cumsum(wanted, dtype=np.int32), wanted, scoring,
            prefill_tokens=rows - decodes, decode_tokens=decodes,
        )  # fmt: skip

    def _count(self, number: int) -> tuple[Int32, Int32]:
        """0 .. number, and `number` ones; neither is to be written to."""
        if number >= len(self._counting):
            self._counting = np.arange(2 * number + 1, dtype=np.int32)
            self._ones = np.ones(2 * number, np.int32)
        return self._counting[: number + 1], self._ones[:number]

    def _plan(
        self,
        tokens: Int32,
        positions: Int32,
        row_starts: Int32,
        places: Int32,
        ends: Int32,
        chosen: Selection,
        logit_rows: Int32,
    ) -> StepPlan:
        """`places` [T] says to which sequence each row belongs."""
        kv = self._kv
        width = kv.blocks_for(int(ends.max()))
        tables = kv.tables(chosen.rows, width)
        blocks, offsets = np.divmod(positions, np.int32(kv.block_size))
        blocks += places * np.int32(width)

        def slots_of(tables: Int32) -> Int32:
            slots = tables.ravel().take(blocks)
            slots *= np.int32(kv.block_size)
            slots += offsets
            return slots

        def copies_of(copies: list[tuple[int, int]]) -> Int32:
            return np.array(copies, np.int32) if copies else _NO_COPIES

        more = []
        for group in kv.more:
            own = group.tables(chosen.rows, width)
            more.append(GroupTables(slots_of(own), own, copies_of(group.take_copies())))
        return StepPlan(
            tokens,
            positions,
            slots_of(tables),
            row_starts,
            ends,
            tables,
            logit_rows,
            copies_of(kv.take_copies()),
            tuple(more),
        )


def _row_tokens(chosen: Selection, row_starts: Int32) -> Int32:
    """[T] the token of each row."""
    tokens = [sequence.tokens for sequence in chosen.sequences]
    found = np.empty(int(row_starts[-1]), np.int32)
    starts = chosen.starts.tolist()
    # Of most sequences only one; the longer pieces are then written over.
    found[row_starts[:-1]] = packed(map(getitem, tokens, starts), len(tokens))
    for place in (chosen.counts > 1).nonzero()[0].tolist():
        first, end, start = int(row_starts[place]), int(row_starts[place + 1]), starts[place]
        found[first:end] = tokens[place][start : start + end - first]
    return found


def _wanted(chosen: Selection, row_starts: Int32) -> tuple[Int32, Int32, bool]:
    """(rows of logits that each sequence wants [S], these rows [R], whether any is scored)."""
    samples = chosen.counts == chosen.wants
    special = [place for place, own in enumerate(chosen.sequences) if reads_all_rows(own)]
    if not special:
        return samples.astype(np.int32), row_starts[1:][samples] - np.int32(1), False
    wanted = samples.astype(np.int32)
    scored = [p for p in special if chosen.sequences[p].request.pooling is None]
    wanted[special] = 0  # of those that are pooled
    wanted[scored] = chosen.counts[scored]
    rows = [
        np.arange(end - count, end, dtype=np.int32)
        for end, count in zip(row_starts[1:].tolist(), wanted.tolist(), strict=True)
    ]
    return wanted, np.concatenate(rows), bool(scored)


def reads_all_rows(sequence: Sequence) -> bool:
    """Whether something is made of every row of the prompt, so that none may be left out for
    being cached: it is pooled, or its tokens are scored, which is done once."""
    request = sequence.request
    if request.pooling is not None:
        return True
    return request.params.prompt_logprobs is not None and sequence.output_length == 0
