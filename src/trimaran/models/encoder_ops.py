"""The operations of an encoder: one sequence, whole, and no cache.

Like `models/ops.py` it is a vocabulary over handles of a type `T`, so that `forward` is
written once.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from trimaran.models.weight import Weight

T = TypeVar("T")


class EncoderOps(Protocol[T]):
    """Activations are float32 [tokens, width] of one sequence."""

    def embed(self, tokens: T, weight: Weight) -> T:
        """Rows of `weight` [vocab, width] picked by `tokens` [tokens]."""
        ...

    def linear(self, x: T, weight: Weight, bias: Weight) -> T:
        """`x @ weight.T + bias`, weight [out, in], bias [out]."""
        ...

    def layer_norm(self, x: T, weight: Weight, bias: Weight, eps: float) -> T:
        """`(x - mean) / sqrt(var + eps) * weight + bias`, over the last axis."""
        ...

    def attention(self, q: T, k: T, v: T, heads: int) -> T:
        """Softmax attention of every token over all tokens, scaled by head_dim ** -0.5."""
        ...

    def gelu(self, x: T) -> T:
        """`x * Φ(x)`, Φ the normal distribution function (not the tanh approximation)."""
        ...

    def add(self, x: T, y: T) -> T:
        """`x + y`."""
        ...
