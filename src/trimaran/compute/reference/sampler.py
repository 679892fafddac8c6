"""Sampling in plain numpy: sorts the whole vocabulary, one row at a time; the oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import BackendError
from trimaran.core.sampling_batch import Float32, Int32, SamplingBatch, Scores


class ReferenceSampler:
    """Implements `Sampler` by the letter of `SamplingBatch`."""

    def choose(self, logits: Float32, batch: SamplingBatch) -> Int32:
        choices = [_choose(logits[row], batch, i) for i, row in enumerate(batch.rows)]
        return np.asarray(choices, np.int32)

    def score(self, logits: Float32, rows: Int32, tokens: Int32, top: int) -> Scores:
        count = len(rows)
        scores = Scores(
            logprobs=np.empty(count, np.float32),
            ranks=np.empty(count, np.int32),
            top_ids=np.empty((count, top), np.int32),
            top_logprobs=np.empty((count, top), np.float32),
        )
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            values = logits[row].astype(np.float64)
            shifted = values - values.max()
            logprobs = shifted - np.log(np.exp(shifted).sum())
            ranking = _ranking(logits[row])
            scores.logprobs[i] = logprobs[token]
            scores.ranks[i] = 1 + int(np.flatnonzero(ranking == token)[0])
            scores.top_ids[i] = ranking[:top]
            scores.top_logprobs[i] = logprobs[ranking[:top]]
        return scores


def _ranking(logits: Float32) -> npt.NDArray[np.int64]:
    """Token ids by (logit descending, id ascending)."""
    return np.argsort(-logits, kind="stable")


def _adjusted(logits: Float32, batch: SamplingBatch, i: int) -> Float32:
    begin, end = batch.adjust_starts[i], batch.adjust_starts[i + 1]
    ids = batch.adjust_ids[begin:end]
    values = logits.copy()
    picked = values[ids] + batch.adjust_bias[begin:end]
    repetition = batch.adjust_repetition[begin:end]
    picked = np.where(picked > 0, picked / repetition, picked * repetition)
    values[ids] = picked - batch.adjust_penalty[begin:end]
    return values


def _choose(logits: Float32, batch: SamplingBatch, i: int) -> int:
    if np.isnan(logits).any():
        raise BackendError(f"the logits of row {batch.rows[i]} are not numbers (NaN)")
    values = _adjusted(logits, batch, i)
    if np.all(values == -np.inf):
        raise BackendError(f"no token is allowed in row {batch.rows[i]}: every logit is -inf")
    if batch.temperature[i] == 0:
        return int(np.argmax(values))
    scaled = values.astype(np.float64) / np.float64(batch.temperature[i])
    weights = np.exp(scaled - scaled.max())
    ranking = _ranking(values)
    kept = len(ranking)
    if batch.top_k[i]:
        kept = min(kept, int(batch.top_k[i]))
    if batch.top_p[i] < 1:
        mass = np.cumsum(weights[ranking[:kept]])
        kept = 1 + int(np.searchsorted(mass, np.float64(batch.top_p[i]) * mass[-1]))
    if batch.min_p[i] > 0:
        least = np.float64(batch.min_p[i])  # the most likely token weighs 1
        kept = int(np.count_nonzero(weights[ranking[:kept]] >= least))
    ids = np.sort(ranking[:kept])
    mass = np.cumsum(weights[ids])
    place = int(np.searchsorted(mass, batch.uniforms[i] * mass[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])
