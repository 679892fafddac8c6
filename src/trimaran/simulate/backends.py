"""Back ends for a virtual clock: one that computes nothing, and one that paces a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.compute.backend import Backend
from trimaran.core.clock import VirtualClock
from trimaran.core.sampling_batch import Float32, Sampler, SamplingBatch, Scores
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.models.layer_groups import LayerGroup

Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Cost = Callable[[StepPlan], float]
"""Seconds that a step takes."""


@dataclass(frozen=True, slots=True)
class PlanCost:
    """The cost of a step by `StepCostModel`'s formula, from its plan alone.

    Attributes:
        step, row, token, position, pair: seconds; the model's coefficients in order.
    """

    step: float
    row: float
    token: float
    position: float
    pair: float

    def __call__(self, plan: StepPlan) -> float:
        """Seconds for a plan; sequences with one row count as decodes."""
        counts = np.diff(plan.row_starts).astype(np.int64)
        contexts = plan.contexts.astype(np.int64)
        single = counts == 1
        many, ends = counts[~single], contexts[~single]
        pairs = int((many * (ends - many) + many * (many + 1) // 2).sum())
        return (
            self.step
            + self.row * int(single.sum())
            + self.token * int(many.sum())
            + self.position * int(contexts[single].sum())
            + self.pair * pairs
        )


class SimulatedBackend:
    """Computes nothing: a step moves the clock by what it costs, and every token is the same.

    Args:
        vocab_size: of the logits, which are all zero.
    """

    def __init__(self, clock: VirtualClock, cost: Cost, vocab_size: int) -> None:
        self._clock = clock
        self._cost = cost
        self._vocab_size = vocab_size
        self.sampler: Sampler = _SameToken()

    def describe(self) -> dict[str, Any]:
        return {"backend": "simulated"}

    def kv_bytes_per_token(self) -> int:
        return 1

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return ()

    def allocate_cache(self, num_blocks: int | Sequence[int], block_size: int) -> None:
        """There is nothing to hold."""

    def kv_block_bytes(self) -> int:
        return 0

    def kv_fingerprint(self) -> bytes:
        return bytes(32)

    def read_blocks(self, blocks: Int32, out: Bytes) -> None:
        raise NotImplementedError("a simulated cache has no contents")

    def write_blocks(self, blocks: Int32, data: Bytes) -> None:
        raise NotImplementedError("a simulated cache has no contents")

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        self._clock.advance(self._cost(plan))
        return np.broadcast_to(np.float32(0), (len(plan.logit_rows), self._vocab_size))

    def close(self) -> None:
        """There is nothing to free."""


class PacedBackend(SimulatedBackend):
    """A real back end whose steps move a virtual clock by what they would cost."""

    def __init__(self, real: Backend, clock: VirtualClock, cost: Cost) -> None:
        super().__init__(clock, cost, 0)
        self._real = real
        self.sampler = real.sampler

    def describe(self) -> dict[str, Any]:
        return self._real.describe() | {"clock": "virtual"}

    def kv_bytes_per_token(self) -> int:
        return self._real.kv_bytes_per_token()

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return self._real.layer_groups()

    def allocate_cache(self, num_blocks: int | Sequence[int], block_size: int) -> None:
        self._real.allocate_cache(num_blocks, block_size)

    def kv_block_bytes(self) -> int:
        return self._real.kv_block_bytes()

    def kv_fingerprint(self) -> bytes:
        return self._real.kv_fingerprint()

    def read_blocks(self, blocks: Int32, out: Bytes) -> None:
        self._real.read_blocks(blocks, out)

    def write_blocks(self, blocks: Int32, data: Bytes) -> None:
        self._real.write_blocks(blocks, data)

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        logits = self._real.run(plan, pooled)
        self._clock.advance(self._cost(plan))
        return logits

    def close(self) -> None:
        self._real.close()


class _SameToken:
    """Draws token 0 from every row."""

    def choose(self, logits: Float32, batch: SamplingBatch) -> Int32:
        return np.zeros(len(batch.rows), np.int32)

    def score(self, logits: Float32, rows: Int32, tokens: Int32, top: int) -> Scores:
        raise NotImplementedError("simulated logits have no probabilities")
