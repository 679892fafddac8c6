"""An encoder in plain numpy float32.

A sequence is computed by itself, by calls whose shapes depend on its length alone, so that
its vector never changes with its company.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trimaran.compute.reference.ops import Array
from trimaran.core.step_plan import StepPlan
from trimaran.models.bert import BertModel
from trimaran.models.weight import Weight


class EncoderReferenceOps:
    """Executes `EncoderOps` at once for one sequence."""

    def __init__(self, values: dict[str, Array]) -> None:
        """`values` keeps dequantised weights by name between steps."""
        self._values = values

    def _of(self, weight: Weight) -> Array:
        if weight.name not in self._values:
            self._values[weight.name] = np.ascontiguousarray(weight.values(), np.float32)
        return self._values[weight.name]

    def embed(self, tokens: Array, weight: Weight) -> Array:
        rows: Array = self._of(weight)[tokens]
        return rows

    def linear(self, x: Array, weight: Weight, bias: Weight) -> Array:
        y: Array = x @ self._of(weight).T + self._of(bias)
        return y

    def layer_norm(self, x: Array, weight: Weight, bias: Weight, eps: float) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float32)
        variance = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
        y: Array = centred / np.sqrt(variance + np.float32(eps)) * self._of(weight)
        return y + self._of(bias)

    def attention(self, q: Array, k: Array, v: Array, heads: int) -> Array:
        queries, keys, values = (
            part.reshape(len(part), heads, -1).swapaxes(0, 1) for part in (q, k, v)
        )
        scores = queries @ keys.swapaxes(1, 2) * np.float32(queries.shape[-1] ** -0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out: Array = (weights @ values).swapaxes(0, 1).reshape(q.shape)
        return out

    def gelu(self, x: Array) -> Array:
        wide = x.astype(np.float64)
        y: Array = (wide * 0.5 * (1.0 + _erf(wide * 2.0**-0.5))).astype(np.float32)
        return y

    def add(self, x: Array, y: Array) -> Array:
        return x + y


def _erf(x: Any) -> Any:
    """The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = np.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * size)
    series = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    total = np.zeros_like(size)
    for factor in series:
        total = (total + factor) * t
    return np.sign(x) * (1.0 - total * np.exp(-size * size))


class ReferenceEncoder:
    """Runs an encoder's `forward` eagerly, and pools what comes."""

    def __init__(self, model: BertModel) -> None:
        self._model = model
        self._values: dict[str, Array] = {}

    def describe(self) -> dict[str, Any]:
        """What it is, for people."""
        sizes = [4 * int(np.prod(weight.shape)) for weight in self._model.weights.values()]
        return {
            "backend": "reference",
            "isa": "numpy",
            "weights": "float32",
            "weight_bytes": sum(sizes),
        }

    def run(self, plan: StepPlan) -> Array:
        """The vector of each sequence of a step, [sequences, width]; each is there whole."""
        config = self._model.config
        out = np.empty((plan.sequences, config.hidden_size), np.float32)
        for s, row in enumerate(out):
            part = slice(plan.row_starts[s], plan.row_starts[s + 1])
            positions = plan.positions[part]
            if positions[0] != 0 or len(positions) != plan.contexts[s]:
                raise AssertionError("a sequence of an encoder's step isn't whole")
            ops, tokens = EncoderReferenceOps(self._values), plan.tokens[part]
            arrays: Any = (tokens, positions, np.zeros_like(tokens))
            hidden = self._model.forward(ops, *arrays)
            row[:] = hidden[0] if config.pooling == "cls" else hidden.mean(0, dtype=np.float32)
            if config.normalize:
                row /= max(float(np.sqrt(np.dot(row, row))), 1e-12)
        return out
