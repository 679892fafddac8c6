"""One step's sampling, for all of its rows at once, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How N tokens are chosen from R rows of logits.

    Processors run in this order on a copy of the row: adjustments, temperature, top-k,
    top-p (over what top-k left, renormalised), min-p (relative to the most likely). Tokens
    are ranked by (logit descending, id ascending); what a filter keeps is a prefix of that
    ranking.
    The token is the first, in order of id among the kept ones, at which the cumulated
    probability exceeds `uniforms`.

    Attributes:
        rows: [N] row of the logits each choice is made from; a row may occur twice.
        temperature: [N] 0 is greedy; then the filters and `uniforms` play no part.
        top_k: [N] 0 keeps all.
        top_p: [N] in (0, 1]; 1 keeps all.
        min_p: [N] in [0, 1]; 0 keeps all.
        uniforms: [N] float64 in [0, 1).
        adjust_starts: [N + 1] where each choice's adjustments begin in the arrays below.
        adjust_ids: [M] token ids, each at most once a choice.
        adjust_bias: [M] added first; -inf forbids the token.
        adjust_repetition: [M] then a positive logit is divided by it, another multiplied.
        adjust_penalty: [M] then subtracted.
    """

    rows: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    uniforms: Float64
    adjust_starts: Int32
    adjust_ids: Int32
    adjust_bias: Float32
    adjust_repetition: Float32
    adjust_penalty: Float32


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities (natural, temperature 1, no processors) of M given tokens.

    Attributes:
        logprobs: [M] float32.
        ranks: [M] 1 + how many tokens rank before it by (logit descending, id ascending).
        top_ids: [M, k] the most likely tokens in that order.
        top_logprobs: [M, k] float32.
    """

    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


class Sampler(Protocol):
    """Chooses and scores tokens; a row's result never depends on the other rows."""

    def choose(self, logits: Float32, batch: SamplingBatch) -> Int32:
        """[N] token ids from logits [R, vocab]. A row of NaN raises `BackendError`."""
        ...

    def score(self, logits: Float32, rows: Int32, tokens: Int32, top: int) -> Scores:
        """Scores of `tokens` [M] under logits[rows], with the `top` most likely."""
        ...
