"""Who computes how much in a step, as columns: cheaper than a record for each sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimaran.core.request import Sequence
from trimaran.schedule.running import Places

Int32 = npt.NDArray[np.int32]


class Selection:
    """Sequences of a step in the order of its rows; an entry a sequence in each column.

    Arrays are not to be written to.

    Attributes:
        sequences: who.
        places: [S] place of each among those that run.
        rows: [S] row of each one's block table.
        starts: [S] tokens computed before.
        wants: [S] tokens known and not computed.
        counts: [S] tokens to compute: 0 < count <= want.
    """

    __slots__ = ("_ends", "counts", "decodes", "places", "rows", "sequences", "starts", "wants")

    def __init__(
        self,
        sequences: list[Sequence],
        places: Places,
        rows: Places,
        starts: Int32,
        wants: Int32,
        counts: Int32,
        decodes: bool = False,
    ) -> None:
        """`decodes` may be given where each one is known to want, and to get, one token."""
        self.sequences = sequences
        self.places = places
        self.rows = rows
        self.starts = starts
        self.wants = wants
        self.counts = counts
        self.decodes = decodes
        self._ends: Int32 | None = None

    @classmethod
    def of(cls, parts: list[tuple[Sequence, int, int, int, int, int]]) -> Selection:
        """From (sequence, place, row, start, want, count) of each."""
        columns = list(zip(*parts, strict=True)) or [()] * 6
        places, rows = (np.array(column, np.intp) for column in columns[1:3])
        starts, wants, counts = (np.array(column, np.int32) for column in columns[3:])
        return cls(list(columns[0]), places, rows, starts, wants, counts)

    def __len__(self) -> int:
        return len(self.sequences)

    def tokens(self) -> int:
        """Tokens to compute, of all."""
        return len(self.counts) if self.decodes else int(self.counts.sum())

    def ends(self) -> Int32:
        """[S] tokens of each in the cache once the step has run."""
        if self._ends is None:
            self._ends = self.starts + self.counts
        return self._ends

    def keep(self, flags: npt.NDArray[np.bool_]) -> Selection:
        """Those whose flag is true."""
        places = flags.nonzero()[0]
        return Selection(
            [self.sequences[place] for place in places.tolist()],
            self.places[places],
            self.rows[places],
            self.starts[places],
            self.wants[places],
            self.counts[places],
            self.decodes,
        )

    def then(self, other: Selection) -> Selection:
        """These, and those of another after them."""
        if not other.sequences:
            return self
        if not self.sequences:
            return other
        return Selection(
            self.sequences + other.sequences,
            np.concatenate([self.places, other.places]),
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.wants, other.wants]),
            np.concatenate([self.counts, other.counts]),
            self.decodes and other.decodes,
        )


NOBODY = Selection.of([])
