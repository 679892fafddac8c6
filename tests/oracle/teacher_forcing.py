"""How far the next-token distributions of a back end are from an oracle's.

Both read the same text; each position is compared by itself, so one difference does not
make the rest differ, as it would in generated text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimaran.compute.backend import Backend
from trimaran.core.step_plan import StepPlan

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

TEXTS = Path(__file__).parent / "texts"
BLOCK_SIZE = 16
TOP = 256


def texts() -> dict[str, str]:
    """The texts to compare on, by name; `dialogue` is written in the chat format."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt"))}


@dataclass(frozen=True, slots=True)
class Distributions:
    """Next-token distributions of T positions, exact for the most likely tokens.

    Attributes:
        ids: [T, k] the most likely tokens, most likely first.
        logprobs: [T, k] theirs.
    """

    ids: Int64
    logprobs: Float64

    @classmethod
    def of(cls, logits: Float32, k: int = TOP) -> Distributions:
        """From logits [T, vocab]."""
        ids = np.argpartition(logits, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, axis=1)
        return cls(ids, _logprobs(logits, ids))

    @classmethod
    def join(cls, parts: Iterable[Distributions]) -> Distributions:
        """Of the positions of each of `parts`, one after another."""
        each = list(parts)
        return cls(
            np.concatenate([part.ids for part in each]),
            np.concatenate([part.logprobs for part in each]),
        )


@dataclass(frozen=True, slots=True)
class OracleText:
    """A text, tokenised by the oracle, and the oracle's distributions at every position."""

    name: str
    ids: list[int]
    distributions: Distributions


@dataclass(frozen=True, slots=True)
class Agreement:
    """Positions one after another, however they were chunked.

    Attributes:
        same: [T] whether both hold the same token for the most likely.
        kl: [T] KL(oracle || other) in nats over the oracle's most likely tokens, all
            others taken together as one: a lower bound of the whole, and close to it.
    """

    same: npt.NDArray[np.bool_]
    kl: Float64

    @classmethod
    def between(cls, oracle: Distributions, logits: Float32) -> Agreement:
        """Of `oracle` [T, k] with logits [T, vocab]."""
        logprobs = _logprobs(logits, oracle.ids)
        p, q = np.exp(oracle.logprobs), np.exp(logprobs)
        p_rest = np.maximum(1 - p.sum(axis=1), 1e-12)
        q_rest = np.maximum(1 - q.sum(axis=1), 1e-12)
        kl = (p * (oracle.logprobs - logprobs)).sum(axis=1) + p_rest * np.log(p_rest / q_rest)
        return cls(logits.argmax(axis=1) == oracle.ids[:, 0], kl)

    @classmethod
    def join(cls, parts: Sequence[Agreement]) -> Agreement:
        return cls(
            np.concatenate([part.same for part in parts]),
            np.concatenate([part.kl for part in parts]),
        )

    @property
    def positions(self) -> int:
        return len(self.same)

    @property
    def greedy(self) -> float:
        """Share of positions at which both would take the same token."""
        return float(self.same.mean())

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def max_kl(self) -> float:
        return float(self.kl.max())

    def __str__(self) -> str:
        return (
            f"{self.positions} positions, greedy token equal at {self.greedy:.2%}, "
            f"KL mean {self.mean_kl:.2e}, 99% {np.quantile(self.kl, 0.99):.2e}, "
            f"largest {self.max_kl:.2e}"
        )


def logits_of(
    backend: Backend, token_ids: Sequence[int], chunk: int = 256
) -> Iterator[tuple[int, Float32]]:
    """Logits after each token of one sequence, which gets the cache for itself.

    Yields:
        (first position, logits [t, vocab]) of `chunk` positions at a time; the array is
        overwritten by the next.
    """
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    backend.allocate_cache(blocks, BLOCK_SIZE)
    table = np.arange(blocks, dtype=np.int32)[None, :]
    for start in range(0, len(token_ids), chunk):
        part = np.asarray(token_ids[start : start + chunk], np.int32)
        positions = np.arange(start, start + len(part), dtype=np.int32)
        yield (
            start,
            backend.run(
                StepPlan(
                    tokens=part,
                    positions=positions,
                    slots=positions,
                    row_starts=np.asarray([0, len(part)], np.int32),
                    contexts=np.asarray([start + len(part)], np.int32),
                    block_tables=table,
                    logit_rows=np.arange(len(part), dtype=np.int32),
                )
            ),
        )


def agreement_of(backend: Backend, token_ids: Sequence[int], oracle: Distributions) -> Agreement:
    """Of a back end with an oracle's distributions for the first len(token_ids) positions."""
    return Agreement.join(
        [
            Agreement.between(
                Distributions(
                    oracle.ids[start : start + len(logits)],
                    oracle.logprobs[start : start + len(logits)],
                ),
                logits,
            )
            for start, logits in logits_of(backend, token_ids)
        ]
    )


def _logprobs(logits: Float32, ids: Int64) -> Float64:
    """[T, k] log-probabilities of tokens `ids` [T, k] under logits [T, vocab]."""
    peak = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - peak).sum(axis=1, keepdims=True, dtype=np.float64))
    picked = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    return picked - peak - total
