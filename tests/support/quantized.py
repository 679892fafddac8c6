"""Random weights in the block types of GGUF files, and the arithmetic of integer products."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
from support.tiny import tiny_model

from trimaran.models.model import Model
from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight

Array = npt.NDArray[np.float32]

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Those that gguf can't write, in blocks of 256: what random codes are, for scales about 1.
K_TYPES = {"Q4_K": 320.0, "Q5_K": 650.0, "Q6_K": 1370.0}
# Where the half-precision scales lie in a block.
_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def block_elements(type_name: str) -> int:
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]


def random_rows(
    type_name: str, outputs: int, inputs: int, seed: int = 0, scale: float = 0.01
) -> npt.NDArray[np.uint8]:
    """[outputs, bytes] of random codes with scales about `scale` (some of them zero)."""
    rng = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (outputs, inputs // elements, size), np.uint8)
    for at in _SCALES[type_name]:
        scales = rng.normal(size=blocks.shape[:2]) * scale
        scales[rng.random(blocks.shape[:2]) < 0.05] = 0
        blocks[:, :, at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def dequantized(type_name: str, rows: npt.NDArray[np.uint8]) -> Array:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])


def rounded_activations(x: Array) -> npt.NDArray[np.float64]:
    """What integer products take for `x`: 12 bits a row, as linear.h states it."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    tiny = largest < 1e-30
    inverse = np.float32(2032) / np.where(tiny, 1, largest).astype(np.float32)
    q = np.where(tiny, 0, np.rint((x * inverse).astype(np.float32)))
    return q.astype(np.float64) * (largest / np.float32(2032)).astype(np.float64)


@dataclass(frozen=True)
class QuantizedStorage:
    """A matrix in a block type, in memory."""

    type_name: str
    rows: npt.NDArray[np.uint8]

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.rows

    def dequantize(self) -> Array:
        return dequantized(self.type_name, self.rows)


def quantized_model(type_name: str, seed: int = 0, **changes: object) -> Model:
    """The tiny model with its matrices rounded to `type_name`, or, of a K type, random codes
    of about their size."""
    dimensions: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96}
    if type_name in K_TYPES:
        rope = RopeSpec(dim=64, theta=10000.0)
        dimensions = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "rope": rope}
    model = tiny_model(seed, **(dimensions | changes))
    weights = {
        name: weight if len(weight.shape) == 1 else _quantized(weight, type_name)
        for name, weight in model.weights.items()
    }
    return type(model)(model.config, weights)  # type: ignore[call-arg]


def mixed_model(types: dict[str, str], seed: int = 0) -> Model:
    """The tiny model with the matrices whose names have a key of `types` in that block type,
    and the others in Q4_1."""
    model = tiny_model(seed, hidden_size=64, intermediate_size=96)
    weights = {}
    for name, weight in model.weights.items():
        kinds = [kind for part, kind in types.items() if part in name] or ["Q4_1"]
        weights[name] = weight if len(weight.shape) == 1 else _quantized(weight, kinds[0])
    return type(model)(model.config, weights)  # type: ignore[call-arg]


def _quantized(weight: Weight, type_name: str) -> Weight:
    values = np.ascontiguousarray(weight.values())
    if type_name in K_TYPES:
        scale = float(values.std()) / K_TYPES[type_name]
        rows = random_rows(type_name, *weight.shape, zlib.crc32(weight.name.encode()), scale)
    else:
        rows = gguf.quantize(values, gguf.GGMLQuantizationType[type_name])
    return Weight(weight.name, weight.shape, QuantizedStorage(type_name, rows))
