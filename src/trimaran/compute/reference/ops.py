"""The operations of a model in plain numpy float32: the oracle of every other back end.

Each row is computed by itself, by calls whose shapes depend on the row's position alone,
so that a row's bits never change with its company. That costs speed, and is the point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import BackendError
from trimaran.core.step_plan import GroupTables, StepPlan
from trimaran.models.ops import AttentionSpec
from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight

Array = npt.NDArray[np.float32]


class PagedKV:
    """K and V of a group of layers: each float32 [layers, blocks, block_size, kv_heads,
    head_dim]."""

    def __init__(
        self, layers: Sequence[int], blocks: int, block_size: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (len(layers), blocks, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self._places = {layer: place for place, layer in enumerate(layers)}
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)

    def __contains__(self, layer: int) -> bool:
        return layer in self._places

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
        place = self._places[layer]
        self.keys[place, blocks, offsets] = keys
        self.values[place, blocks, offsets] = values

    def read(
        self, layer: int, table: npt.NDArray[np.int32], start: int, length: int
    ) -> tuple[Array, Array]:
        """Positions start .. length through a block table: each [kv_heads, length - start,
        head_dim]. Blocks that end before `start` are not touched."""
        first = start // self.block_size
        blocks = table[first : -(-length // self.block_size)]
        own = slice(start - first * self.block_size, length - first * self.block_size)
        place = self._places[layer]
        flat = (-1, *self.keys.shape[-2:])
        keys = self.keys[place, blocks].reshape(flat)[own]
        values = self.values[place, blocks].reshape(flat)[own]
        return (
            np.ascontiguousarray(keys.swapaxes(0, 1)),
            np.ascontiguousarray(values.swapaxes(0, 1)),
        )


CACHED = 8192
"""Weights that stay in the nearest cache while all rows meet them."""


def product_by_rows(matrix: Array, x: Array) -> Array:
    """x @ matrix.T: [T, outputs] of matrix [outputs, inputs] and x [T, inputs].

    Matrix-vector products only, of each row with a few outputs at a time: a matrix-matrix
    product may sum a row in another order when it has other company.
    """
    outputs, inputs = matrix.shape
    few = min(outputs, max(1, CACHED // inputs))
    whole = outputs // few * few
    y = np.empty((len(x), outputs), np.float32)
    for begin, end, size in ((0, whole, few), (whole, outputs, outputs - whole)):
        if begin < end:
            pieces = matrix[begin:end].reshape(-1, 1, size, inputs) @ x[:, :, None]
            y[:, begin:end] = pieces[..., 0].swapaxes(0, 1).reshape(len(x), end - begin)
    return y


def by_group(plan: StepPlan, groups: int) -> list[GroupTables]:
    """The plan's tables for each of so many groups of layers."""
    first = GroupTables(plan.slots, plan.block_tables, plan.copies)
    if not plan.more:
        return [first] * groups
    if len(plan.more) != groups - 1:
        raise BackendError(
            f"step plan: block tables for {len(plan.more) + 1} groups of layers, not {groups}"
        )
    return [first, *plan.more]


class ReferenceOps:
    """Executes `Ops` at once for one step.

    Attributes:
        hidden: [T, width] what the logits were made of, once they were.
    """

    hidden: Array

    def __init__(
        self,
        plan: StepPlan,
        tables: Sequence[GroupTables],
        caches: Sequence[PagedKV],
        values: dict[str, Array],
    ) -> None:
        """
        Args:
            tables, caches: one for each group of layers.
            values: keeps dequantised weights by name between steps.
        """
        self._plan = plan
        self._groups = list(zip(tables, caches, strict=True))
        self._values = values

    def _of(self, weight: Weight) -> Array:
        if weight.name not in self._values:
            self._values[weight.name] = np.ascontiguousarray(weight.values(), np.float32)
        return self._values[weight.name]

    def embed(self, tokens: Array, weight: Weight, scale: float = 1.0) -> Array:
        rows: Array = self._of(weight)[tokens]
        return rows if scale == 1.0 else rows * np.float32(scale)

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        y = product_by_rows(self._of(weight), x)
        return y if bias is None else y + self._of(bias)

    def rms_norm(self, x: Array, weight: Weight, eps: float, heads: int = 1) -> Array:
        parts = x.reshape(len(x) * heads, -1)
        mean: Array = np.mean(parts * parts, axis=-1, keepdims=True, dtype=np.float32)
        root: Array = np.sqrt(mean + np.float32(eps))
        y: Array = parts / root * self._of(weight)
        return y.reshape(x.shape)

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
        tables, cache = next(group for group in self._groups if spec.layer in group[1])
        cache.write(spec.layer, tables.slots, k.reshape(kv_shape), v.reshape(kv_shape))
        queries = q.reshape(len(q), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        out = np.empty_like(queries)
        for s, table in enumerate(tables.block_tables):
            rows = range(plan.row_starts[s], plan.row_starts[s + 1])
            start = spec.first_seen(int(plan.positions[rows[0]]))
            keys, values = cache.read(spec.layer, table, start, int(plan.contexts[s]))
            for row in rows:
                position = int(plan.positions[row])
                seen = slice(spec.first_seen(position) - start, position + 1 - start)
                own_keys, own_values = keys[:, seen], values[:, seen]
                if spec.window:  # laid out alike, wherever the rows before it began
                    own_keys, own_values = own_keys.copy(), own_values.copy()
                scores = queries[row] @ own_keys.swapaxes(1, 2) * np.float32(spec.scale)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                out[row] = weights @ own_values
        return out.reshape(q.shape)

    def silu_mul(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-gate) may be inf: the quotient is then 0
            y: Array = gate / (1 + np.exp(-gate)) * up
        return y

    def gelu_mul(self, gate: Array, up: Array) -> Array:
        inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
        y: Array = np.float32(0.5) * gate * (1 + np.tanh(inner)) * up
        return y

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def logits(self, x: Array, weight: Weight) -> Array:
        self.hidden = x
        return self.linear(x[self._plan.logit_rows], weight)
