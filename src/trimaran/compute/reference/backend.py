"""The reference back end: numpy, float32, slow, obviously right."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimaran.compute.reference.ops import Array, PagedKV, ReferenceOps
from trimaran.compute.reference.sampler import ReferenceSampler
from trimaran.core.errors import BackendError, CapacityError
from trimaran.core.sampling_batch import Float32
from trimaran.core.step_plan import StepPlan
from trimaran.models.model import Model
from trimaran.models.ops import Batch


class ReferenceBackend:
    """Runs a model's `forward` eagerly; implements `Backend`.

    Weights are dequantised to float32 at their first use; the KV cache is float32.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._values: dict[str, Array] = {}
        self._cache: PagedKV | None = None
        self.sampler = ReferenceSampler()

    def describe(self) -> dict[str, Any]:
        return {
            "backend": "reference",
            "isa": "numpy",
            "threads": 1,
            "weights": "float32",
            "kv": "float32",
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "weight_bytes": sum(4 * int(np.prod(w.shape)) for w in self._model.weights.values()),
        }

    def kv_bytes_per_token(self) -> int:
        config = self._model.config
        return 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        config = self._model.config
        self._cache = None
        try:
            self._cache = PagedKV(
                config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim
            )
        except MemoryError:
            size = num_blocks * block_size * self.kv_bytes_per_token()
            raise CapacityError(
                f"the KV cache of {num_blocks} blocks needs {size} bytes, which can't be had;"
                " lower kv_cache_bytes or kv_memory_fraction"
            ) from None

    def run(self, plan: StepPlan) -> Float32:
        if self._cache is None:
            raise BackendError("the KV cache was not allocated; call allocate_cache first")
        for source, target in plan.copies:
            self._cache.copy_blocks(source, target)
        ops = ReferenceOps(plan, self._cache, self._values)
        logits: Array = self._model.forward(ops, Batch(plan.tokens, plan.positions))  # type: ignore[arg-type]
        return logits

    def close(self) -> None:
        self._cache = None
        self._values.clear()
