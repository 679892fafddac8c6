"""How long a step takes, learnt from the steps that were run.

    seconds ≈ a + b · decode rows + c · prefill tokens + d · decode context + e · prefill pairs

`a` is what a step costs whatever is in it (weights are read once), `b` and `c` are the linear
layers' share of a row (rows of decodes have logits too), `d` is reading the KV cache, a token
of context for each decode, and `e` is the attention of a prompt's chunk: a row and a position
it attends to are one pair, so a chunk of n tokens after s others has n·s + n·(n + 1)/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.schedule.selection import Selection

Float64 = npt.NDArray[np.float64]

_SCALES = np.array([1.0, 16.0, 256.0, 16384.0, 262144.0])
_PRIOR = np.array([2e-3, 2e-3, 20e-3, 1e-3, 4e-3])  # a small model on two cores, by scale
_ENDURANCE = 0.995  # an observation counts half after 138 others
_IMPATIENCE = 0.03  # how much less that is where predictions are off in one direction
_RIDGE = 1e-4  # in observations: of the pull towards the coefficients of before
_TRUST = 2.0  # times that differ more than by this from the prediction are weighted by themselves
_SWEEPS = 4
_LEARNING = 16  # observations after each of which it is solved anew; later only after some


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What makes a step long.

    Attributes:
        decode_rows: rows of sequences that have one token to compute.
        prefill_tokens: rows of the others.
        decode_context: positions that the rows of decodes attend to, in all.
        prefill_pairs: positions that the other rows attend to, in all.
    """

    decode_rows: int = 0
    prefill_tokens: int = 0
    decode_context: int = 0
    prefill_pairs: int = 0

    @classmethod
    def of(cls, chosen: Selection) -> StepLoad:
        """That of a step's selection."""
        if chosen.decodes:
            return cls(len(chosen), 0, int(chosen.ends().sum()), 0)
        decoding = chosen.wants == 1
        counts, starts = chosen.counts.astype(np.int64), chosen.starts
        pairs = counts * starts + counts * (counts + 1) // 2
        rows, contexts = int(decoding.sum()), int(pairs[decoding].sum())
        return cls(rows, int(counts.sum()) - rows, contexts, int(pairs.sum()) - contexts)

    def with_chunk(self, start: int, count: int) -> StepLoad:
        """And `count` tokens of a prompt that has `start` computed."""
        return StepLoad(
            self.decode_rows,
            self.prefill_tokens + count,
            self.decode_context,
            self.prefill_pairs + count * start + count * (count + 1) // 2,
        )

    def features(self) -> Float64:
        """[5] what the scaled coefficients are multiplied by."""
        own = (1, self.decode_rows, self.prefill_tokens, self.decode_context, self.prefill_pairs)
        scaled: Float64 = np.array(own, np.float64) / _SCALES
        return scaled


class StepCostModel:
    """Recursive least squares with forgetting, none of the coefficients below zero.

    Formula: minimises Σ λ^age · ((y - x·θ) / p)² + ρ·|θ - θ'|² over θ >= 0. p is what was
    predicted for the step, so that errors are relative, but at least y / 2 and at most 2·y: a
    step that took k times as long as predicted pulls with about 4 / k of its error, so one in
    which the process was stopped, or the very first, does next to nothing. θ' are the
    coefficients of before: what recent steps say nothing about (prefill, while all decode)
    stays as it was. λ is 0.995, and falls to 0.965 while predictions are off in one direction.
    Cost: some microseconds an observation, some tens when the next prediction is asked for.
    Faults: a straight line, where thread pools and caches make steps; a machine that is
    shared has times that no model knows. Everything is a function of what was observed.
    """

    def __init__(self) -> None:
        self._theta = _PRIOR.copy()
        self._moments = np.zeros((5, 5))  # Σ x·xᵀ / p²
        self._products = np.zeros(5)  # Σ x·y / p²
        self._unsolved = 0  # observations since the coefficients were solved for
        self._error = 1.0  # usual relative error
        self._bias = 0.0  # mean relative error of the last ten steps or so
        self.observations = 0
        self.decode_rows = 1.0  # of a step that has any, on the average of late

    @property
    def relative_error(self) -> float:
        """By how much a prediction is usually off, as a share of it."""
        return self._error

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """a, b, c, d, e: seconds a step, a row, a token, a position, a pair."""
        a, b, c, d, e = (self._solved() / _SCALES).tolist()
        return a, b, c, d, e

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step with this load took so long; times of 0 and below are ignored."""
        if not seconds > 0.0 or not math.isfinite(seconds):
            return
        features = load.features()
        if self.observations == 0:  # of another machine's prior only the proportions count
            self._theta *= seconds / float(features @ self._theta)
        learning = self.observations < _LEARNING
        theta = self._solved() if learning or self._unsolved >= 8 else self._theta
        predicted = float(features @ theta)
        error = max((seconds - predicted) / seconds, -1.0)
        self._error += (abs(error) - self._error) * (0.3 if learning else 0.03)
        self._bias += (error - self._bias) * 0.1
        endurance = _ENDURANCE - _IMPATIENCE * abs(self._bias)
        usual = min(max(predicted, seconds / _TRUST), seconds * _TRUST)
        features /= usual
        self._moments *= endurance
        self._moments += np.outer(features, features)
        self._products *= endurance
        self._products += features * (seconds / usual)
        self._unsolved += 1
        self.observations += 1
        if load.decode_rows:
            self.decode_rows += 0.05 * (load.decode_rows - self.decode_rows)

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step with this load takes."""
        return float(load.features() @ self._solved())

    def chunk_within(self, load: StepLoad, seconds: float, start: int) -> int:
        """The most tokens of a prompt with `start` computed that can be added to a step with
        this load so that it takes no longer than `seconds`; 0 where it does so without any."""
        _, _, c, _, e = self.coefficients
        left = seconds - self.predict(load)
        if left <= 0.0:
            return 0
        linear = c + e * (start + 0.5)  # a token's share, without the pairs within the chunk
        if e <= 1e-18:
            return int(left / linear) if linear > 0.0 else 1 << 30
        root = math.sqrt(linear * linear + 2.0 * e * left)
        return int(2.0 * left / (linear + root))  # the stable form of (root - linear) / e

    def prefill_seconds(self, start: int, count: int) -> float:
        """What computing `count` tokens of a sequence after `start` adds to steps."""
        _, _, c, _, e = self.coefficients
        return c * count + e * (count * start + count * (count + 1) / 2)

    def decode_seconds(self, context: float, count: float) -> float:
        """What `count` decodes of a sequence add, with `context` tokens before the first: its
        rows, its context, and its part of what a step costs anyway, which it shares with as
        many others as decode of late."""
        a, b, _, d, _ = self.coefficients
        return count * (a / self.decode_rows + b + d * (context + count / 2))

    # ------------------------------------------------------------------ the fit

    def _solved(self) -> Float64:
        """[5] the coefficients by scale, solved anew where there were observations."""
        if self._unsolved == 0:
            return self._theta
        self._unsolved = 0
        # A pull in proportion to the weight of all observations is alike for fast and slow
        # machines.
        pull = _RIDGE * self._moments[0, 0]
        matrix = self._moments + pull * np.eye(5)
        wanted = self._products + pull * self._theta
        self._theta = _least_squares(matrix, wanted)
        return self._theta


def _least_squares(matrix: Float64, wanted: Float64) -> Float64:
    """[5] the minimum over θ >= 0 of θ·matrix·θ / 2 - wanted·θ, or very nearly."""
    used = np.ones(len(wanted), bool)
    theta = np.zeros(len(wanted))
    while used.any():
        theta[:] = 0.0
        theta[used] = np.linalg.solve(matrix[used][:, used], wanted[used])
        if theta.min() >= 0.0:
            break
        used &= theta > 0.0
    if not used.all():  # of those left out too early, coordinate descent takes some back in
        theta = np.maximum(theta, 0.0)
        for _ in range(_SWEEPS):
            for i in range(len(theta)):
                step = (wanted[i] - matrix[i] @ theta) / matrix[i, i]
                theta[i] = max(0.0, theta[i] + step)
    return theta
