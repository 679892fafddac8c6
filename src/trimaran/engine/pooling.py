"""The prompts in an engine of which a vector is wanted: what was added up of each so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import BackendError, RequestError
from trimaran.core.pooling import POOLINGS
from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import PooledRows
from trimaran.schedule.scheduler import ScheduledStep

Vector = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=1)
"""Of a request that is pooled: it holds no more than its prompt, and none of it counts."""


class Pools:
    """Sums of hidden rows by sequence.

    They are float64 and grow by one row after the other, in order of position, so a vector is
    bit for bit the same however its prompt was chunked. A prompt that lost its blocks is
    computed from its beginning, since a cached prefix has no hidden rows; so is its sum.

    Args:
        width: elements of a hidden row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._sums: dict[Sequence, Float64] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, sequence: Sequence) -> None:
        """A prompt to be pooled was taken in."""
        self._sums[sequence] = np.zeros(self._width)

    def drop(self, sequence: Sequence) -> None:
        """It has ended; harmless for one that is unknown."""
        self._sums.pop(sequence, None)

    def rows_of(self, step: ScheduledStep) -> PooledRows | None:
        """What is to be added up in a step, or None. Its sums are copies until `take`."""
        if not self._sums:
            return None
        places, rows = [], []
        chosen, starts = step.chosen, step.plan.row_starts.tolist()
        for place, sequence in enumerate(chosen.sequences):
            sums = self._sums.get(sequence)
            if sums is None:
                continue
            first, end = starts[place], starts[place + 1]
            if int(chosen.starts[place]) == 0:
                sums[:] = 0.0
            if sequence.request.pooling == "last":
                whole = int(chosen.starts[place]) + end - first == sequence.total
                first = end - 1 if whole else end
            places.append(sums)
            rows.append((first, end))
        if not rows:
            return None
        return PooledRows(np.array(rows, np.int32), np.stack(places))

    def take(self, step: ScheduledStep, pooled: PooledRows) -> None:
        """The step has run, and these are its sums."""
        own = (sequence for sequence in step.chosen.sequences if sequence in self._sums)
        for sequence, sums in zip(own, pooled.sums, strict=True):
            self._sums[sequence][:] = sums

    def whole(self, step: ScheduledStep) -> list[Sequence]:
        """Those in a step whose prompts are computed now."""
        return [
            sequence
            for sequence in step.chosen.sequences
            if sequence in self._sums and sequence.computed == sequence.total
        ]

    def vector(self, sequence: Sequence) -> Vector:
        """float32 [width] of a prompt that is computed; not normalised.

        Raises:
            BackendError: it has numbers that aren't finite.
        """
        count = 1 if sequence.request.pooling == "last" else sequence.total
        vector = (self._sums[sequence] / count).astype(np.float32)
        if not np.isfinite(vector).all():
            raise BackendError("the model gave numbers that aren't finite")
        return vector


def check_pooling(request: Request, complete: bool) -> None:
    """Raises `RequestError` where a request wants what a vector doesn't go with."""
    if request.pooling not in POOLINGS:
        raise RequestError(f"pooling is {request.pooling!r}; give one of {', '.join(POOLINGS)}")
    params = request.params
    if params.n != 1 or params.prompt_logprobs is not None or params.logprobs is not None:
        raise RequestError(
            "a request with pooling gets one vector and no tokens; leave n, logprobs and"
            " prompt_logprobs out"
        )
    if not complete:
        raise RequestError("a prompt that still arrives can't be pooled; send it at once")


def normalized(vector: Vector) -> Vector:
    """The vector with length 1; zeros stay."""
    wide = vector.astype(np.float64)
    length = max(float(np.sqrt(np.dot(wide, wide))), 1e-12)
    return (wide / length).astype(np.float32)
