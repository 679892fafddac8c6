"""Tensors that lie in a memory-mapped file, in the storage of that file."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import CheckpointError

_SIGNATURES = (
    (b"GGUF", "a GGUF file"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"PK\x03\x04", "a ZIP archive, as PyTorch's pickled checkpoints are; convert to safetensors"),
    (b"\x80\x02", "a Python pickle; convert to safetensors"),
    (b"\x80\x03", "a Python pickle; convert to safetensors"),
    (b"\x80\x04", "a Python pickle; convert to safetensors"),
    (b"\x80\x05", "a Python pickle; convert to safetensors"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run 'git lfs pull'"),
    (b"<!DOCTYPE", "an HTML page: a failed download"),
    (b"<html", "an HTML page: a failed download"),
    (b"tjgg", "a file of GGUF's predecessor (ggjt); convert the model anew"),
    (b"lmgg", "a file of GGUF's predecessor (ggml); convert the model anew"),
)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped read-only: [size]. Touches no data.

    Raises:
        CheckpointError: it can't be opened, is no file, or is empty.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise CheckpointError(f"{path} is empty; fetch it again")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    return np.frombuffer(mapped, np.uint8)


def looks_like(data: npt.NDArray[np.uint8]) -> str:
    """What a file that isn't the expected one seems to be, as a tail for a message."""
    head = data[:64].tobytes()
    for signature, description in _SIGNATURES:
        if head.startswith(signature):
            return f"; it looks like {description}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < data.size:
        return "; it looks like a safetensors file"
    return ""


_PIECE = 1 << 17  # elements that are dequantised at once


@dataclass(frozen=True, slots=True, eq=False)
class MappedStorage:
    """One tensor's bytes in a mapped file; implements `Storage`.

    Attributes:
        type_name: ggml's or safetensors' name of the type; they agree on F32, F16 and BF16.
        shape: row-major (outermost dimension first).
        data: [bytes] the tensor's own part of the file.
        type_id: ggml's number of a block type, for the `gguf` package.
    """

    type_name: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    type_id: int = -1

    def raw(self) -> npt.NDArray[np.uint8]:
        """[shape[0], bytes] as they lie in the file, read-only: an element of a vector or a
        row of a matrix each."""
        return self.data.reshape(self.shape[0] if self.shape else 1, -1)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values in `shape`; for F32 a read-only view of the file."""
        if self.type_name == "F32":
            values: npt.NDArray[np.float32] = self.data.view("<f4")
            if not values.flags.aligned:
                values = values.copy()
        elif self.type_name == "F16":
            values = self.data.view("<f2").astype(np.float32)
        elif self.type_name == "BF16":
            values = (self.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = self._dequantize_blocks()
        return values.reshape(self.shape)

    def _dequantize_blocks(self) -> npt.NDArray[np.float32]:
        import gguf  # not at the top: start-up can do without it

        kind = gguf.GGMLQuantizationType(self.type_id)
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = self.data.reshape(-1, size)
        values = np.empty((len(blocks), elements), np.float32)
        # Rows don't matter to blocks; a piece that fits the CPU's cache is up to five times
        # faster than the few rows at once that the package would take.
        step = _PIECE // elements
        for start in range(0, len(blocks), step):
            piece = blocks[start : start + step]
            values[start : start + step] = gguf.dequantize(piece.reshape(1, -1), kind).reshape(
                -1, elements
            )
        return values
