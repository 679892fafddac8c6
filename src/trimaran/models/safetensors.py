"""Safetensors files, memory-mapped, one or many with an index.

    header size u64 | header: JSON {name: {dtype, shape, data_offsets}} | data

Offsets count from the start of the data, which the tensors fill without gaps. All is
little-endian. Specification: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.json_file import parse_json_object, read_json_object
from trimaran.models.storage import MappedStorage, looks_like, map_file

MAX_HEADER_BYTES = 16 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_DIMENSIONS = 8

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsFile:
    """A file whose header has been read and checked.

    Attributes:
        tensors: by name, in the order of the header.
        header: [bytes] everything before the tensors' data.
        size: of the file, bytes.
    """

    path: Path
    tensors: Mapping[str, MappedStorage]
    header: npt.NDArray[np.uint8]
    size: int

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Maps a file and reads its header.

        Raises:
            CheckpointError: it is not safetensors, is truncated, or contradicts itself.
            UnsupportedModelError: a tensor has another dtype than F32, F16 or BF16.
        """
        data = map_file(path)
        start = _header_end(path, data)
        entries = parse_json_object(data[8:start].tobytes(), f"the header of {path}")
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise _unsound(path, "__metadata__ is not an object")
        tensors = {
            name: _tensor(path, name, entries[name], data[start:])
            for name in entries
            if not _is_buffer(name, entries[name])
        }
        _check_layout(path, entries, data.size - start)
        return cls(path, tensors, data[:start], data.size)


def open_safetensors(folder: Path) -> tuple[SafetensorsFile, ...]:
    """The files of a model's folder: `model.safetensors`, or those its index names.

    Raises:
        CheckpointError: there are none, one is missing or unsound, or the index and the files
            don't name the same tensors.
        UnsupportedModelError: a dtype isn't supported.
    """
    if (folder / SINGLE_NAME).exists():
        return (SafetensorsFile.open(folder / SINGLE_NAME),)
    if not (folder / INDEX_NAME).exists():
        raise _no_weights(folder)
    index = _read_index(folder / INDEX_NAME)
    files = tuple(_open_shard(folder, shard) for shard in sorted(set(index.values())))
    for file in files:
        for name in file.tensors:
            if index.get(name) != file.path.name:
                place = f"in {index[name]}" if name in index else "nowhere"
                raise CheckpointError(
                    f"{file.path} holds tensor {name!r}, which {INDEX_NAME} places {place};"
                    " fetch both again"
                )
    found = {name for file in files for name in file.tensors}
    for name, shard in index.items():
        if name not in found:
            raise CheckpointError(
                f"{folder / shard} lacks tensor {name!r}, which {INDEX_NAME} places there;"
                " fetch both again"
            )
    return files


def _unsound(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound safetensors file: {problem}; fetch it again")


def _header_end(path: Path, data: npt.NDArray[np.uint8]) -> int:
    size = int.from_bytes(data[:8].tobytes(), "little")
    tail = looks_like(data)
    if data.size < 8 or (tail and "safetensors file" not in tail):
        raise CheckpointError(f"{path} is not a safetensors file{tail}")
    if size > MAX_HEADER_BYTES:
        raise _unsound(path, f"its header has {size} bytes, above the limit of {MAX_HEADER_BYTES}")
    if size > data.size - 8:
        raise _unsound(path, f"its header has {size} bytes and the file {data.size} (truncated?)")
    return 8 + size


def _tensor(path: Path, name: str, entry: object, data: npt.NDArray[np.uint8]) -> MappedStorage:
    what = f"tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _unsound(path, f"{what} isn't described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _unsound(path, f"the dtype of {what} isn't text")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or 0 in shape:
        raise _unsound(path, f"the shape of {what} can't be one")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _unsound(path, f"the data_offsets of {what} aren't two positions")
    if dtype not in _ELEMENT_BYTES:
        raise UnsupportedModelError(
            f"{path}: {what} has dtype {dtype}, which is not supported; weights must be"
            f" {', '.join(_ELEMENT_BYTES)}"
        )
    begin, end = offsets
    if not begin <= end <= data.size:
        raise _unsound(
            path, f"{what} lies at bytes {begin} to {end} of {data.size} bytes of data (truncated?)"
        )
    size = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if end - begin != size:
        raise _unsound(
            path, f"{what}, {dtype} of shape {tuple(shape)}, has {end - begin} bytes, not {size}"
        )
    return MappedStorage(dtype, tuple(shape), data[begin:end])


def _is_buffer(name: str, entry: object) -> bool:
    """Whether it is 0, 1, 2, …, which old encoders carry along as whole numbers."""
    counts = name.rpartition(".")[2] == "position_ids"
    return counts and isinstance(entry, dict) and entry.get("dtype") == "I64"


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
        for value in values
    )


def _check_layout(path: Path, entries: Mapping[str, object], size: int) -> None:
    """The tensors fill the data: no byte is shared, left over or skipped."""
    free = 0
    spans = [(*entry["data_offsets"], name) for name, entry in entries.items()]  # type: ignore[index]
    for begin, end, name in sorted(spans):
        if begin < free:
            raise _unsound(path, f"tensor {name!r} overlaps the one before it")
        if begin > free:
            raise _unsound(path, f"bytes {free} to {begin} of the data belong to no tensor")
        free = end
    if free != size:
        raise _unsound(path, f"bytes {free} to {size} of the data belong to no tensor")


def _read_index(path: Path) -> dict[str, str]:
    """Shard's file name by tensor."""
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; fetch it again")
    for name, shard in weight_map.items():
        if not _is_plain_name(shard):
            raise CheckpointError(
                f"{path} places tensor {name!r} in {shard!r}, which is not the plain name of a"
                " safetensors file in the same folder; refused"
            )
    return weight_map


def _is_plain_name(shard: object) -> bool:
    return (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and not shard.startswith(".")
        and not set(shard) & {"/", "\\", ":", "\0"}
    )


def _open_shard(folder: Path, shard: str) -> SafetensorsFile:
    if not (folder / shard).exists():
        raise CheckpointError(
            f"{folder} lacks {shard}, which {INDEX_NAME} names; fetch the model again"
        )
    return SafetensorsFile.open(folder / shard)


def _no_weights(folder: Path) -> CheckpointError:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return CheckpointError(
            f"{folder} holds weights only as Python pickles ({pickled[0]}), which can run code and"
            " are never opened; convert them to safetensors"
        )
    return CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}")
