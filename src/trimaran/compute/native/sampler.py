"""Sampling in C++: all rows in one call, the vocabulary never sorted."""

from __future__ import annotations

import numpy as np

from trimaran.compute.native import _native
from trimaran.core.errors import BackendError
from trimaran.core.sampling_batch import Float32, Int32, SamplingBatch, Scores


class NativeSampler:
    """Implements `Sampler`; every instruction set and number of threads gives the same bits.

    Weights are float32, summed in float64, so where a uniform falls within about 1e-6 of
    the boundary between two tokens the choice may be the neighbour of the one that exact
    arithmetic would make. A row with an infinite logit is refused like one with a NaN.
    """

    def __init__(self, isa: str, pool: _native.ThreadPool | None = None) -> None:
        """Chooses on the threads of an executor, or on the caller's alone.

        Args:
            isa: "portable", "avx2", "avx512" or "amx", one that this machine can run.
            pool: `Executor.pool`; calls must not overlap with that executor's `run`.
        """
        self._sampler = _native.Sampler(isa, pool)

    def choose(self, logits: Float32, batch: SamplingBatch) -> Int32:
        """[N] token ids from logits [R, vocab], float32 and C-contiguous.

        Raises:
            BackendError: a row has a NaN or infinite logit, or no token that is allowed.
        """
        tokens = np.empty(len(batch.rows), np.int32)
        try:
            self._sampler.choose(
                logits,
                batch.rows,
                batch.temperature,
                batch.top_k,
                batch.top_p,
                batch.min_p,
                batch.uniforms,
                batch.adjust_starts,
                batch.adjust_ids,
                batch.adjust_bias,
                batch.adjust_repetition,
                batch.adjust_penalty,
                tokens,
            )
        except _native.SamplerError as error:
            raise BackendError(str(error)) from None
        return tokens

    def score(self, logits: Float32, rows: Int32, tokens: Int32, top: int) -> Scores:
        """Scores of `tokens` [M] under logits[rows], with the `top` most likely.

        Raises:
            BackendError: a row has a NaN or infinite logit, or none above -inf.
        """
        count = len(rows)
        scores = Scores(
            logprobs=np.empty(count, np.float32),
            ranks=np.empty(count, np.int32),
            top_ids=np.empty((count, top), np.int32),
            top_logprobs=np.empty((count, top), np.float32),
        )
        try:
            self._sampler.score(
                logits,
                rows,
                tokens,
                scores.logprobs,
                scores.ranks,
                scores.top_ids,
                scores.top_logprobs,
            )
        except _native.SamplerError as error:
            raise BackendError(str(error)) from None
        return scores
