"""The sequences that hold blocks, in order of admission, as columns.

    place          0      1      2      3
    sequences   [ r0  ,  r4  ,  r4#1,  r7  ]   lists
    tokens      [ [..],  [..],  [..],  [..]]
    tickets     [ 0   ,  5   ,  6   ,  9   ]   ascending: finds a place in O(log R)
    computed    [ 17  ,  40  ,  40  ,  0   | ...]   arrays, longer than what is used
    rows        [ 3   ,  0   ,  8   ,  1   | ...]
    targets     [ 0.1 ,  inf ,  inf ,  0.04| ...]
    totals      [ 18  ,  41  ,  41  ,  9   | ...]   of known tokens, and the last of them:
    lasts       [ 502 ,  7   ,  11  ,  88  | ...]   right only while `_known`

A step reads whole columns, so what it costs a sequence is that of array operations; a
sequence that comes or goes moves those behind it by one place.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.core.request import Sequence

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


_last = itemgetter(-1)


@lru_cache(maxsize=64)
def _packer(number: int) -> struct.Struct:
    return struct.Struct(f"={number}i")


def packed(values: Iterable[int], number: int) -> Int32:
    """[number] int32 from Python's integers, in two thirds of the time of `np.fromiter`; not
    to be written to."""
    return np.frombuffer(_packer(number).pack(*values), np.int32)


class Running:
    """Columns over the running sequences; all arrays have a place for each, and spare ones.

    Attributes:
        sequences: in order of admission; the forks of a sequence directly after it.
        tokens: `Sequence.tokens` of each: the very list, which grows and is never replaced.
        version: another number whenever a sequence has changed its place.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.tokens: list[list[int]] = []
        self.version = 0
        self._tickets: list[int] = []
        self._ticket: dict[Sequence, int] = {}
        self._next = 0
        self._computed: Int32 = np.zeros(16, np.int32)
        self._rows: Places = np.zeros(16, np.intp)
        self._targets: Float64 = np.zeros(16, np.float64)
        self._totals: Int32 = np.zeros(16, np.int32)
        self._lasts: Int32 = np.zeros(16, np.int32)
        self._known = False  # else totals and lasts are read off the lists of tokens

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._ticket

    @property
    def computed(self) -> Int32:
        """[R] tokens of each whose KV is in the cache (a view)."""
        return self._computed[: len(self.sequences)]

    @property
    def rows(self) -> Places:
        """[R] row of each one's block table in the cache's matrix (a view)."""
        return self._rows[: len(self.sequences)]

    @property
    def targets(self) -> Float64:
        """[R] seconds an output token of each may take; inf where that is anybody's guess."""
        return self._targets[: len(self.sequences)]

    def wants(self) -> Int32:
        """[R] tokens of each that are known and not computed (a new array)."""
        number = len(self.sequences)
        if self._known:
            return self._totals[:number] - self.computed
        return packed(map(len, self.tokens), number) - self.computed

    def lasts(self) -> Int32:
        """[R] the last token of each (a new array)."""
        number = len(self.sequences)
        if self._known:
            return self._lasts[:number].copy()
        return packed(map(_last, self.tokens), number).copy()

    def sampled(self, places: Places, tokens: Int32) -> None:
        """Those at `places` are about to be given these tokens, one each, or to end. Where
        they are all that run, nobody's list of tokens has to be read for the next step."""
        if len(places) == len(self.sequences):
            self._totals[places] = self._computed[places] + np.int32(1)
            self._lasts[places] = tokens
            self._known = True

    def add(self, sequence: Sequence, row: int, forks: int) -> None:
        """Adds the last admitted, computed as far as `Sequence.computed` says.

        Args:
            row: of its block table.
            forks: how many sequences `add_fork` may add for it later.
        """
        ticket = self._next
        self._next += 1 + forks
        self._insert(len(self.sequences), sequence, row, ticket)

    def add_fork(self, parent: Sequence, child: Sequence, row: int, number: int) -> None:
        """Adds the `number`-th fork (from 1) of a sequence."""
        ticket = self._ticket[parent] + number
        self._insert(bisect_left(self._tickets, ticket), child, row, ticket)

    def remove(self, sequence: Sequence) -> int:
        """Takes a sequence out; returns the place that it had."""
        place = self.place(sequence)
        last = len(self.sequences) - 1
        for column in (self.sequences, self.tokens, self._tickets):
            del column[place]
        for array in self._arrays():
            array[place:last] = array[place + 1 : last + 1]
        del self._ticket[sequence]
        self.version += 1
        return place

    def place(self, sequence: Sequence) -> int:
        """Where a sequence is."""
        return bisect_left(self._tickets, self._ticket[sequence])

    def advance(self, places: Places, ends: Int32) -> None:
        """Sets the computed tokens of those at `places`; the sequences' own the caller sets."""
        self._computed[places] = ends
        self._known = False

    def check(self) -> None:
        """Raises `AssertionError` where the columns contradict the sequences."""
        if self.computed.tolist() != [sequence.computed for sequence in self.sequences]:
            raise AssertionError("the column of computed tokens differs from the sequences'")
        if any(own is not s.tokens for own, s in zip(self.tokens, self.sequences, strict=True)):
            raise AssertionError("a sequence's list of tokens was replaced")
        if self._known:
            ends = [(len(own), own[-1]) for own in self.tokens]
            if (
                list(zip(self._totals.tolist(), self._lasts.tolist(), strict=True))[: len(ends)]
                != ends
            ):
                raise AssertionError("the columns of known tokens differ from the lists")
        if self._tickets != [self._ticket[sequence] for sequence in self.sequences]:
            raise AssertionError("tickets are out of order")

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self._computed, self._rows, self._targets, self._totals, self._lasts

    def _insert(self, place: int, sequence: Sequence, row: int, ticket: int) -> None:
        count = len(self.sequences)
        self._known = False
        if count == len(self._computed):
            self._computed, self._rows, self._targets, self._totals, self._lasts = (
                np.concatenate([array, np.zeros_like(array)]) for array in self._arrays()
            )
        if place < count:
            for array in self._arrays():
                array[place + 1 : count + 1] = array[place:count].copy()
            self.version += 1
        self.sequences.insert(place, sequence)
        self.tokens.insert(place, sequence.tokens)
        self._tickets.insert(place, ticket)
        self._ticket[sequence] = ticket
        self._computed[place] = sequence.computed
        self._rows[place] = row
        target = sequence.request.slo.tpot
        self._targets[place] = math.inf if target is None else target
