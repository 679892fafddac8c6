"""A tensor of a checkpoint, still in the storage of its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Storage(Protocol):
    """The bytes of one tensor and how to read them; implemented by each file format."""

    @property
    def type_name(self) -> str:
        """The format's own name of the element or block type, e.g. "Q4_1" or "BF16"."""
        ...

    def raw(self) -> npt.NDArray[np.uint8]:
        """[rows, bytes a row] as they lie in the file (memory-mapped, read-only)."""
        ...

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values, float32, in the tensor's shape; computed anew at each call."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A named tensor.

    Attributes:
        name: canonical (Hugging Face) name, e.g. "model.layers.0.self_attn.q_proj.weight".
        shape: (out, in) of a linear or embedding, (width,) of a norm or bias.
        storage: where its values come from.
        head_permutation: heads whose rows are stored in interleaved-RoPE order (GGUF files
            of the "llama" architecture do so for q and k); 0 where they are not. Readers
            of `raw` must reorder rows by `row_order`; `values` has done it.
        offset: `values` adds it to what is stored (Gemma's norms in Hugging Face's files are
            stored less 1). Only of vectors, which nobody reads by `raw`.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    head_permutation: int = 0
    offset: float = 0.0

    def row_order(self) -> npt.NDArray[np.int64] | None:
        """Rows of the file in the order the model wants, or None if it is the file's."""
        if not self.head_permutation:
            return None
        rows = np.arange(self.shape[0])
        half = self.shape[0] // self.head_permutation // 2
        return rows.reshape(self.head_permutation, half, 2).swapaxes(1, 2).reshape(-1)

    def values(self) -> npt.NDArray[np.float32]:
        """float32 values in `shape`, rows in the model's order."""
        values = self.storage.dequantize().reshape(self.shape)
        if self.offset:
            values = values + np.float32(self.offset)
        order = self.row_order()
        return values if order is None else values[order]

    def raw_rows(self) -> npt.NDArray[np.uint8]:
        """`storage.raw()` with rows in the model's order."""
        raw = self.storage.raw()
        order = self.row_order()
        return raw if order is None else raw[order]
