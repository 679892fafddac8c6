"""From a checkpoint's tensors to the packed weights that the kernels stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trimaran.compute.native import _native
from trimaran.compute.native.recorder import Tape, matrices_of, vocabulary_matrices
from trimaran.models.weight import Weight


def pack_weight(weight: Weight, target: str, isa: str) -> _native.PackedLinear:
    """A matrix in the layout of csrc/linear.h.

    Args:
        target: "as-is" keeps the exact values of the block types that the kernels know
            (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K); other types, and floats, are
            rounded to bf16. "bf16", "int8" and "int4" convert any type.
        isa: of the tier that will multiply with it; the layout depends on it.
    """
    storage, order = weight.storage, weight.row_order()
    if _native.packable(storage.type_name):
        rows = np.ascontiguousarray(storage.raw())
        return _native.pack(storage.type_name, rows, weight.shape[1], order, target, isa)
    values = np.ascontiguousarray(weight.values(), np.float32)
    return _native.pack("F32", values.view(np.uint8), weight.shape[1], None, target, isa)


def pack_all(tape: Tape, target: str, isa: str, threads: int) -> dict[str, _native.PackedLinear]:
    """The tape's matrices by name, each once, on several threads.

    With "int4" those of the vocabulary are held in int8: they have a row a token, and what 4
    bits lose there is out of proportion.
    """
    matrices = {weight.name: weight for weight in matrices_of(tape)}
    finer = vocabulary_matrices(tape) if target == "int4" else set()

    def pack(weight: Weight) -> _native.PackedLinear:
        return pack_weight(weight, "int8" if weight.name in finer else target, isa)

    with ThreadPoolExecutor(threads) as pool:
        packed = pool.map(pack, matrices.values())
        return dict(zip(matrices, packed, strict=True))
