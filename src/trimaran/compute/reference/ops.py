"""The operations of a model in plain numpy float32: the oracle of every other back end.

Each row is computed by itself, by calls whose shapes depend on the row's position alone,
so that a row's bits never change with its company. That costs speed, and is the point.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimaran.core.step_plan import StepPlan
from trimaran.models.ops import AttentionSpec
from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight

Array = npt.NDArray[np.float32]


class PagedKV:
    """K and V of all layers: each float32 [layers, blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (layers, blocks, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)

    def copy_blocks(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    @property
    def block_bytes(self) -> int:
        """Of K and V in all layers."""
        return 2 * self.keys[:, 0].nbytes

    def block_bits(self, block: int) -> npt.NDArray[np.uint8]:
        """uint8 [block_bytes]: a copy of K, then V, of all layers."""
        return np.concatenate(
            [part[:, block].reshape(-1).view(np.uint8) for part in (self.keys, self.values)]
        )

    def set_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """What `block_bits` returned."""
        for part, half in zip((self.keys, self.values), np.split(data, 2), strict=True):
            part[:, block] = half.view(np.float32).reshape(part[:, block].shape)

    def write(self, layer: int, slots: npt.NDArray[np.int32], keys: Array, values: Array) -> None:
        """keys, values: [T, kv_heads, head_dim]."""
        blocks, offsets = np.divmod(slots, self.block_size)
        self.keys[layer, blocks, offsets] = keys
        self.values[layer, blocks, offsets] = values

    def read(self, layer: int, table: npt.NDArray[np.int32], length: int) -> tuple[Array, Array]:
        """The first `length` positions through a block table: each [kv_heads, length, head_dim]."""
        blocks = table[: -(-length // self.block_size)]
        flat = (-1, *self.keys.shape[-2:])
        keys = self.keys[layer, blocks].reshape(flat)[:length]
        values = self.values[layer, blocks].reshape(flat)[:length]
        return (
            np.ascontiguousarray(keys.swapaxes(0, 1)),
            np.ascontiguousarray(values.swapaxes(0, 1)),
        )


class ReferenceOps:
    """Executes `Ops` at once for one step."""

    def __init__(self, plan: StepPlan, cache: PagedKV, values: dict[str, Array]) -> None:
        """`values` keeps dequantised weights by name between steps."""
        self._plan = plan
        self._cache = cache
        self._values = values

    def _of(self, weight: Weight) -> Array:
        if weight.name not in self._values:
            self._values[weight.name] = np.ascontiguousarray(weight.values(), np.float32)
        return self._values[weight.name]

    def embed(self, tokens: Array, weight: Weight) -> Array:
        rows: Array = self._of(weight)[tokens]
        return rows

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        # One matrix-vector product a row: a matrix-matrix product may sum a row in another
        # order when it has other company.
        y = np.empty((len(x), weight.shape[0]), np.float32)
        matrix = self._of(weight)
        for row, out in zip(x, y, strict=True):
            np.matmul(matrix, row, out=out)
        return y if bias is None else y + self._of(bias)

    def rms_norm(self, x: Array, weight: Weight, eps: float) -> Array:
        mean: Array = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        root: Array = np.sqrt(mean + np.float32(eps))
        y: Array = x / root * self._of(weight)
        return y

    def rope(self, x: Array, positions: Array, heads: int, spec: RopeSpec) -> Array:
        angles = np.asarray(positions, np.float64)[:, None] * spec.frequencies()
        cos = np.cos(angles).astype(np.float32)[:, None, :]
        sin = np.sin(angles).astype(np.float32)[:, None, :]
        y = x.reshape(len(x), heads, -1).copy()
        half = spec.dim // 2
        first, second = y[..., :half].copy(), y[..., half : spec.dim].copy()
        y[..., :half] = first * cos - second * sin
        y[..., half : spec.dim] = second * cos + first * sin
        return y.reshape(x.shape)

    def attention(self, q: Array, k: Array, v: Array, spec: AttentionSpec) -> Array:
        plan, kv_shape = self._plan, (-1, spec.kv_heads, spec.head_dim)
        self._cache.write(spec.layer, plan.slots, k.reshape(kv_shape), v.reshape(kv_shape))
        queries = q.reshape(len(q), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        out = np.empty_like(queries)
        for s, table in enumerate(plan.block_tables):
            keys, values = self._cache.read(spec.layer, table, int(plan.contexts[s]))
            for row in range(plan.row_starts[s], plan.row_starts[s + 1]):
                seen = int(plan.positions[row]) + 1
                scores = queries[row] @ keys[:, :seen].swapaxes(1, 2) * np.float32(spec.scale)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                out[row] = weights @ values[:, :seen]
        return out.reshape(q.shape)

    def silu_mul(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-gate) may be inf: the quotient is then 0
            y: Array = gate / (1 + np.exp(-gate)) * up
        return y

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def logits(self, x: Array, weight: Weight) -> Array:
        return self.linear(x[self._plan.logit_rows], weight)
