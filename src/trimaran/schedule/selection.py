"""Who computes how much in a step, as columns: cheaper than a record for each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt

from trimaran.core.request import Sequence

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Selection:
    """Sequences of a step in the order of its rows; one entry a sequence in each list.

    Attributes:
        sequences: who.
        starts: tokens computed before.
        wants: tokens known and not computed.
        counts: tokens to compute: 0 < count <= want.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    wants: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _ends: Int32 | None = None

    def ends(self) -> Int32:
        """[S] tokens of each in the cache once the step has run; not to be written to."""
        if self._ends is None:
            starts = np.array(self.starts, np.int32)
            single = sum(self.counts) == len(self.counts)
            self._ends = starts + (np.int32(1) if single else np.array(self.counts, np.int32))
        return self._ends

    def keep(self, flags: list[bool]) -> None:
        """Drops the sequences whose flag is false."""
        self._ends = None
        self.sequences = list(compress(self.sequences, flags))
        self.starts = list(compress(self.starts, flags))
        self.wants = list(compress(self.wants, flags))
        self.counts = list(compress(self.counts, flags))

    def append(self, sequence: Sequence, start: int, want: int, count: int) -> None:
        """Adds a sequence at the end."""
        self._ends = None
        self.sequences.append(sequence)
        self.starts.append(start)
        self.wants.append(want)
        self.counts.append(count)
