"""The vocabulary in which every model is written, once.

An architecture's `forward(ops, batch)` calls these operations on handles of a type `T`
that only the back end understands: the reference back end passes numpy arrays through
and computes at once; the native back end passes symbols and records a plan, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Handles of a step's inputs.

    Attributes:
        tokens: [T] token ids.
        positions: [T] absolute positions.
    """

    tokens: T
    positions: T


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention is, besides its inputs.

    Attributes:
        layer: 0-based; which layer of the KV cache it writes and reads.
        heads: query heads.
        kv_heads: key and value heads; `heads` is a multiple.
        head_dim: elements of a head.
        scale: factor on the scores, usually head_dim ** -0.5.
        window: positions that a row sees, its own included; 0 is all before it.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0

    def first_seen(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0


class Ops(Protocol[T]):
    """The operations. Activations are float32 [rows, width] unless said otherwise."""

    def embed(self, tokens: T, weight: Weight, scale: float = 1.0) -> T:
        """Rows of `weight` [vocab, width] picked by `tokens` [T], times `scale`: [T, width]."""
        ...

    def linear(self, x: T, weight: Weight, bias: Weight | None = None) -> T:
        """`x @ weight.T + bias`, weight [out, in], bias [out]."""
        ...

    def rms_norm(self, x: T, weight: Weight, eps: float, heads: int = 1) -> T:
        """`x / sqrt(mean(x², axis=-1) + eps) * weight` of each of `heads` equal parts of a
        row, weight [width / heads]."""
        ...

    def rope(self, x: T, positions: T, heads: int, spec: RopeSpec) -> T:
        """Rotary embedding, half-split (NeoX) pairing, of each of `heads` heads of x."""
        ...

    def attention(self, q: T, k: T, v: T, spec: AttentionSpec) -> T:
        """Writes k and v into the layer's KV cache at the step's slots, then causal
        attention of each row over its sequence's positions `spec.first_seen(position)` ..
        position: [T, heads * head_dim]. What lies before is not read: its blocks may be gone."""
        ...

    def silu_mul(self, gate: T, up: T) -> T:
        """`silu(gate) * up`."""
        ...

    def gelu_mul(self, gate: T, up: T) -> T:
        """`gelu(gate) * up`, gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³)))."""
        ...

    def add(self, x: T, y: T) -> T:
        """`x + y`."""
        ...

    def logits(self, x: T, weight: Weight) -> T:
        """`x[logit_rows] @ weight.T`: [R, vocab], only for the rows that the step wants."""
        ...
