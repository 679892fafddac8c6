"""The reference back end: numpy, float32, slow, obviously right."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from trimaran.compute.backend import Bytes, Int32, blocks_by_group, no_memory
from trimaran.compute.reference.ops import Array, PagedKV, ReferenceOps, by_group
from trimaran.compute.reference.sampler import ReferenceSampler
from trimaran.core.errors import BackendError
from trimaran.core.sampling_batch import Float32
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.models.layer_groups import LayerGroup, layer_groups
from trimaran.models.model import Model
from trimaran.models.ops import Batch


class ReferenceBackend:
    """Runs a model's `forward` eagerly; implements `Backend`.

    Weights are dequantised to float32 at their first use; the KV cache is float32.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._values: dict[str, Array] = {}
        self._caches: list[PagedKV] = []
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

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self._model.config)

    def allocate_cache(self, num_blocks: int | Sequence[int], block_size: int) -> None:
        config = self._model.config
        counts = blocks_by_group(num_blocks, self.layer_groups())
        self._caches = []
        try:
            self._caches = [
                PagedKV(group.layers, count, block_size, config.num_kv_heads, config.head_dim)
                for group, count in zip(self.layer_groups(), counts, strict=True)
            ]
        except MemoryError:
            raise no_memory(self, counts, block_size) from None

    def kv_block_bytes(self) -> int:
        return self._caches[0].block_bytes if len(self._caches) == 1 else 0

    def kv_fingerprint(self) -> bytes:
        cache = self._cached()
        head = f"reference {np.__version__} {self._model.config} {cache.keys.shape}"
        digest = hashlib.sha256(head.encode())
        for name, weight in sorted(self._model.weights.items()):
            digest.update(f"{name} {weight.storage.type_name}\n".encode())
            digest.update(np.ascontiguousarray(weight.raw_rows()).data)
        return digest.digest()

    def read_blocks(self, blocks: Int32, out: Bytes) -> None:
        cache = self._check_blocks(blocks, out)
        for row, block in zip(out, blocks, strict=True):
            row[:] = cache.block_bits(int(block))

    def write_blocks(self, blocks: Int32, data: Bytes) -> None:
        cache = self._check_blocks(blocks, data)
        for row, block in zip(data, blocks, strict=True):
            cache.set_block(int(block), row)

    def _check_blocks(self, blocks: Int32, data: Bytes) -> PagedKV:
        cache = self._cached()
        shape = (len(blocks), cache.block_bytes)
        if data.dtype != np.uint8 or data.shape != shape or not data.flags.c_contiguous:
            raise BackendError(
                f"KV blocks: {data.dtype} {list(data.shape)} for {len(blocks)} blocks;"
                f" give C-contiguous uint8 {list(shape)}"
            )
        count = cache.keys.shape[1]
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < count:
            raise BackendError(f"blocks {blocks.tolist()}: the KV cache has 0 to {count - 1}")
        return cache

    def _cached(self) -> PagedKV:
        """The one cache of a model whose layers are one group."""
        if len(self._caches) != 1:
            raise BackendError(
                "the KV cache was not allocated, or in groups of layers, whose blocks are not"
                " copied one by one"
            )
        return self._caches[0]

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        if not self._caches:
            raise BackendError("the KV cache was not allocated; call allocate_cache first")
        tables = by_group(plan, len(self._caches))
        for cache, own in zip(self._caches, tables, strict=True):
            for source, target in own.copies:
                cache.copy_blocks(source, target)
        ops = ReferenceOps(plan, tables, self._caches, self._values)
        logits: Array = self._model.forward(ops, Batch(plan.tokens, plan.positions))  # type: ignore[arg-type]
        if pooled is not None:
            for (first, end), sums in zip(pooled.rows, pooled.sums, strict=True):
                for row in ops.hidden[first:end]:
                    sums += row
        return logits

    def close(self) -> None:
        self._caches = []
        self._values.clear()
