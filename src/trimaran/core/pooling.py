"""Pooling: one vector of a prompt's hidden rows, where no answer is wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

POOLINGS = ("mean", "last")
"""The mean of all rows after the final norm, or the last one: names of llama.cpp and vLLM."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Hidden rows of a step (after the final norm, one a row of the step) to be added up.

    Attributes:
        rows: int32 [P, 2] the first row, and the one after the last; C-contiguous.
        sums: float64 [P, width] to which they are added, one after the other in order, so that
            it makes no difference in how many steps a prompt is computed; C-contiguous.
    """

    rows: npt.NDArray[np.int32]
    sums: npt.NDArray[np.float64]
