"""Safetensors files, written from the format's description and not with the package's reader,
so that a mistake in that shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    values: Callable[[str], npt.NDArray[np.float32]],
    dtype: str,
) -> None:
    """Writes tensors one by one, so that only one at a time need be in memory.

    Args:
        values: of the tensor of a name; called once each, in order.
        dtype: "F32", or "F16" or "BF16": rounded to nearest, ties to even.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in shapes:
            _cast(values(name), dtype).tofile(file)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    values = np.ascontiguousarray(values, np.float32)
    if dtype != "BF16":
        return values if dtype == "F32" else values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
