"""Builds one step's `SamplingBatch`, and turns scores into log-probability entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import BackendError
from trimaran.core.outputs import Logprob, Logprobs
from trimaran.core.sampling_batch import Float32, Sampler, SamplingBatch, Scores
from trimaran.core.uniforms import uniform
from trimaran.engine.generation import Generation
from trimaran.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pick:
    """A generation that gets its next token from a row of the step's logits."""

    generation: Generation
    row: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the sampling of a step needs besides its logits; `forks`: a request forks first."""

    picks: list[Pick]
    batch: SamplingBatch
    forks: bool


def choose(
    sampler: Sampler, logits: Float32, picks: list[Pick], batch: SamplingBatch
) -> tuple[list[int | None], dict[int, str]]:
    """A token for each pick, all rows together.

    Args:
        batch: `sampling_batch(picks)`.

    Returns:
        (tokens, errors): where a row can't be sampled (NaN, nothing allowed) its token is
        None and `errors` has the reason under the pick's index; the others aren't disturbed.
    """
    try:
        return list(map(int, sampler.choose(logits, batch))), {}
    except BackendError:
        if len(picks) == 1:
            raise
    tokens: list[int | None] = []
    errors: dict[int, str] = {}
    for i, pick in enumerate(picks):
        try:
            tokens.append(int(sampler.choose(logits, sampling_batch([pick]))[0]))
        except BackendError as error:
            tokens.append(None)
            errors[i] = str(error)
    return tokens, errors


def sampling_batch(picks: list[Pick]) -> SamplingBatch:
    """The parameters of all picks as arrays."""
    params = [pick.generation.live.request.params for pick in picks]
    adjusted = [
        a.arrays() if (a := pick.generation.adjustments) is not None else None for pick in picks
    ]
    sizes = [0 if arrays is None else len(arrays[0]) for arrays in adjusted]
    present = [arrays for arrays in adjusted if arrays is not None]
    return SamplingBatch(
        rows=np.array([pick.row for pick in picks], np.int32),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        uniforms=np.array([_draw(pick) for pick in picks], np.float64),
        adjust_starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        adjust_ids=_joined([a[0] for a in present], np.int32),
        adjust_bias=_joined([a[1] for a in present], np.float32),
        adjust_repetition=_joined([a[2] for a in present], np.float32),
        adjust_penalty=_joined([a[3] for a in present], np.float32),
    )


def _draw(pick: Pick) -> float:
    """By position in the output, so preemption and company don't change the stream."""
    sequence = pick.generation.sequence
    if pick.generation.live.request.params.greedy:
        return 0.0
    return uniform(sequence.seed, sequence.output_length)


def _joined(arrays: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def score_picks(
    sampler: Sampler, logits: Float32, picks: list[Pick], tokens: list[int | None]
) -> tuple[Scores | None, dict[int, int]]:
    """Scores of the chosen tokens of the picks that asked for log-probabilities.

    Returns:
        (scores, places): the place in the scores of each such pick, by its index.
    """
    asked = [
        i
        for i, pick in enumerate(picks)
        if pick.generation.live.request.params.logprobs is not None and tokens[i] is not None
    ]
    if not asked:
        return None, {}
    top = max(picks[i].generation.live.request.params.logprobs or 0 for i in asked)
    chosen = np.array([tokens[i] for i in asked], np.int32)
    rows = np.array([picks[i].row for i in asked], np.int32)
    return sampler.score(logits, rows, chosen, top), {i: at for at, i in enumerate(asked)}


def entry(scores: Scores, place: int, token: int, top: int, tokenizer: Tokenizer) -> Logprobs:
    """The chosen token first, then the `top` most likely ones."""
    found = {
        token: Logprob(
            float(scores.logprobs[place]), int(scores.ranks[place]), _text(tokenizer, token)
        )
    }
    for rank in range(top):
        other = int(scores.top_ids[place, rank])
        if other not in found:
            value = float(scores.top_logprobs[place, rank])
            found[other] = Logprob(value, rank + 1, _text(tokenizer, other))
    return found


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")
