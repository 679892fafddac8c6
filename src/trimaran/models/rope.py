"""Rotary position embedding: which angle each pair of a head turns by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent interpolation (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one layer.

    Attributes:
        dim: elements of a head that turn (the first `dim`), even.
        theta: base of the geometric series of frequencies.
        linear_factor: positions are divided by it ("linear" scaling); 1 is none.
        llama3: Llama 3.1's scaling, if any.
        divisors: [dim / 2] per-frequency divisors (GGUF's `rope_freqs`), if any.
    """

    dim: int
    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None

    def frequencies(self) -> npt.NDArray[np.float64]:
        """[dim / 2] radians a position, computed in float64."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        freqs = self.theta**-exponents / self.linear_factor
        if self.llama3 is not None:
            freqs = _llama3(freqs, self.llama3)
        if self.divisors is not None:
            freqs = freqs / np.asarray(self.divisors, np.float64)
        return freqs

    def tables(self, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(cos, sin), each float32 [positions, dim / 2], rounded once from float64."""
        angles = np.arange(positions, dtype=np.float64)[:, None] * self.frequencies()
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(freqs: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * freqs / scaling.factor + smooth * freqs
