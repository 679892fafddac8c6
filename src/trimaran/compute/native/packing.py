"""From a checkpoint's tensors to the packed weights that the kernels stream."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trimaran.compute.native import _native
from trimaran.models.weight import Weight


def pack_weight(weight: Weight, target: str) -> _native.PackedLinear:
    """A matrix in the layout of csrc/linear.h.

    Args:
        target: "as-is" keeps the exact values of the block types that the kernels know
            (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K); other types, and floats, are
            rounded to bf16. "bf16" and "int8" convert any type.
    """
    storage, order = weight.storage, weight.row_order()
    if _native.packable(storage.type_name):
        rows = np.ascontiguousarray(storage.raw())
        return _native.pack(storage.type_name, rows, weight.shape[1], order, target)
    values = np.ascontiguousarray(weight.values(), np.float32)
    return _native.pack("F32", values.view(np.uint8), weight.shape[1], None, target)


def pack_all(
    weights: Iterable[Weight], target: str, threads: int
) -> dict[str, _native.PackedLinear]:
    """Packed matrices by name, each weight once, on several threads."""
    matrices = {weight.name: weight for weight in weights}
    with ThreadPoolExecutor(threads) as pool:
        packed = pool.map(lambda weight: pack_weight(weight, target), matrices.values())
        return dict(zip(matrices, packed, strict=True))
