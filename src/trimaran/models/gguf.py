"""GGUF files: a bounded walk over the header, then tensors mapped from the file.

    "GGUF" | version u32 | tensors u64 | keys u64
    keys:     name, type u32, value
    tensors:  name, dimensions u32, sizes u64 (innermost first), type u32, offset u64
    padding to a multiple of `general.alignment`
    data:     each tensor at its offset from here

A string is its length, u64, and UTF-8 bytes; an array is the type of its elements, u32,
their number, u64, and the elements. All is little-endian. Specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Everything in the header is checked against the file before it is believed, so a corrupt
file costs an error and no memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.storage import MappedStorage, looks_like, map_file

MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a ggml type stores numbers: `elements` of a row in `size` bytes."""

    name: str
    elements: int
    size: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
"""By ggml's number: the types that `gguf.dequantize` reads."""

# Of metadata values: struct codes by GGUF's number; 8 is a string and 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_U64 = struct.Struct("<Q")


class _Cursor:
    """Reads a header from front to back and never past its end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.view = data.data
        self.at = 0
        self._size = len(data)
        self.end = min(self._size, MAX_HEADER_BYTES)

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a sound GGUF file: {problem}; fetch it again")

    def past_end(self, what: str) -> CheckpointError:
        if self.end < self._size:
            return self.fail(f"the header has more than {MAX_HEADER_BYTES} bytes at {what}")
        return self.fail(f"it ends within {what} (truncated at {self._size} bytes?)")

    def take(self, size: int, what: str) -> int:
        """Moves over `size` bytes and returns where they start."""
        start = self.at
        if size > self.end - start:
            raise self.past_end(what)
        self.at = start + size
        return start

    def u32(self, what: str) -> int:
        start = self.take(4, what)
        return int.from_bytes(self.view[start : start + 4], "little")

    def u64(self, what: str) -> int:
        start = self.take(8, what)
        return int.from_bytes(self.view[start : start + 8], "little")

    def count(self, what: str, most: int) -> int:
        count = self.u64(what)
        if count > most:
            raise self.fail(f"{what} is {count}, above the limit of {most}")
        return count

    def string(self, what: str) -> str:
        size = self.u64(f"the length of {what}")
        start = self.take(size, what)
        try:
            return str(self.view[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def name(self, what: str) -> str:
        size = int.from_bytes(self.view[self.at : self.at + 8], "little")
        if size > MAX_NAME_BYTES:
            raise self.fail(f"{what} has {size} bytes, above the limit of {MAX_NAME_BYTES}")
        return self.string(what)

    def skip_strings(self, count: int, what: str) -> None:
        """Moves over `count` strings; the one loop over a vocabulary, so it is kept tight."""
        at, end, view, unpack = self.at, self.end, self.view, _U64.unpack_from
        for _ in range(count):
            if at > end - 8:
                raise self.past_end(what)
            at += 8 + unpack(view, at)[0]
        if at > end:
            raise self.past_end(what)
        self.at = at


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in the header that has been walked over and not yet been read."""

    cursor: _Cursor
    key: str
    kind: int
    count: int
    start: int

    def read(self) -> list[object]:
        cursor = self.cursor
        if self.kind != _STRING:
            dtype = np.dtype(_SCALARS[self.kind]).newbyteorder("<")
            return np.frombuffer(cursor.view, dtype, self.count, self.start).tolist()  # type: ignore[no-any-return]
        at, view, unpack = self.start, cursor.view, _U64.unpack_from
        strings: list[object] = []
        try:
            for _ in range(self.count):
                begin = at + 8
                at = begin + unpack(view, at)[0]
                strings.append(str(view[begin:at], "utf-8"))
        except UnicodeDecodeError:
            raise cursor.fail(f"element {len(strings)} of {self.key} is not UTF-8") from None
        return strings


class Metadata(Mapping[str, object]):
    """A file's key-value pairs: bool, int, float, str, or a list of one of them.

    Arrays are read from the file at first use and kept.
    """

    def __init__(self, values: dict[str, object]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = value.read()
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """A file whose header has been read and checked.

    Attributes:
        metadata: see `Metadata`.
        tensors: by the file's names, in the file's order.
        header: [bytes] everything before the tensors' data.
        keys_end: where in it the metadata end and the tensors' descriptions begin.
        size: of the file, bytes.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, MappedStorage]
    header: npt.NDArray[np.uint8]
    keys_end: int
    size: int

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Maps a file and reads its header.

        Raises:
            CheckpointError: it is not GGUF, is truncated, or contradicts itself.
            UnsupportedModelError: a sound file of another version, byte order or block type.
        """
        data = map_file(path)
        cursor = _Cursor(path, data)
        _check_version(cursor, data)
        tensor_count = cursor.count("the number of tensors", MAX_TENSORS)
        key_count = cursor.count("the number of metadata keys", MAX_KEYS)
        metadata = Metadata(dict(_read_keys(cursor, key_count)))
        keys_end = cursor.at
        entries = [_read_entry(cursor) for _ in range(tensor_count)]
        alignment = _alignment(cursor, metadata)
        start = -(-cursor.at // alignment) * alignment
        _check_layout(cursor, entries, start, len(data), alignment)
        tensors = {entry.name: entry.storage(data, start) for entry in entries}
        return cls(path, metadata, tensors, data[: cursor.at], keys_end, len(data))

    def metadata_bytes(self) -> bytes:
        """A GGUF file of the same metadata and no tensors."""
        header = self.header[: self.keys_end].tobytes()
        return header[:8] + _U64.pack(0) + header[16:]


def _check_version(cursor: _Cursor, data: npt.NDArray[np.uint8]) -> None:
    if data[:4].tobytes() != b"GGUF":
        raise CheckpointError(f"{cursor.path} is not a GGUF file{looks_like(data)}")
    cursor.at = 4
    version = cursor.u32("the version")
    if version in (2 << 24, 3 << 24):
        raise UnsupportedModelError(
            f"{cursor.path} is a big-endian GGUF file; convert it to little-endian"
        )
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{cursor.path} has GGUF version {version}; 2 and 3 are supported, convert it anew"
        )


def _read_keys(cursor: _Cursor, count: int) -> Iterator[tuple[str, object]]:
    seen: set[str] = set()
    for index in range(count):
        key = cursor.name(f"the name of metadata key {index}")
        if key in seen:
            raise cursor.fail(f"metadata key {key!r} comes twice")
        seen.add(key)
        yield key, _read_value(cursor, key, cursor.u32(f"the type of {key!r}"))


def _read_value(cursor: _Cursor, key: str, kind: int) -> object:
    what = f"metadata key {key!r}"
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.fail(f"{what} has unknown type {kind}")
    code = "<" + _SCALARS[kind]
    start = cursor.take(struct.calcsize(code), what)
    if kind == _BOOL and cursor.view[start] > 1:
        raise cursor.fail(f"{what} is a boolean of value {cursor.view[start]}")
    value: object = struct.unpack_from(code, cursor.view, start)[0]
    return value


def _read_array(cursor: _Cursor, key: str) -> _Array:
    what = f"the array {key!r}"
    kind = cursor.u32(f"the element type of {what}")
    if kind != _STRING and kind not in _SCALARS:
        raise cursor.fail(f"{what} has elements of unknown type {kind}")
    count = cursor.u64(f"the length of {what}")
    start = cursor.at
    if kind == _STRING:
        if count > (cursor.end - start) // 8:
            raise cursor.past_end(what)
        cursor.skip_strings(count, what)
    else:
        cursor.take(count * struct.calcsize("<" + _SCALARS[kind]), what)
    return _Array(cursor, key, kind, count, start)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header describes it; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    size: int

    def storage(self, data: npt.NDArray[np.uint8], start: int) -> MappedStorage:
        begin = start + self.offset
        own = data[begin : begin + self.size]
        return MappedStorage(BLOCK_TYPES[self.type_id].name, self.shape, own, self.type_id)


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.name("the name of a tensor")
    what = f"tensor {name!r}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"{what} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise cursor.fail(f"{what} has shape {shape}")
    type_id = cursor.u32(what)
    offset = cursor.u64(what)
    block = BLOCK_TYPES.get(type_id)
    if block is None:
        raise UnsupportedModelError(
            f"{cursor.path}: {what} has block type {type_id} ({_type_name(type_id)}), which is not"
            f" supported; quantise the model to another type, such as Q4_K_M or Q8_0"
        )
    if shape[-1] % block.elements:
        raise cursor.fail(
            f"{what} of shape {shape} does not divide into {block.name} blocks of {block.elements}"
        )
    size = math.prod(shape) // block.elements * block.size
    return _Entry(name, shape, type_id, offset, size)


def _type_name(type_id: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return "unknown"


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a small power of two")
    return alignment


def _check_layout(
    cursor: _Cursor, entries: list[_Entry], start: int, size: int, alignment: int
) -> None:
    """Every tensor aligned, inside the file, and sharing no byte or name with another."""
    names: set[str] = set()
    free = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.name in names:
            raise cursor.fail(f"tensor {entry.name!r} comes twice")
        names.add(entry.name)
        if entry.offset % alignment:
            raise cursor.fail(
                f"tensor {entry.name!r} lies at offset {entry.offset}, no multiple of {alignment}"
            )
        if entry.offset < free:
            raise cursor.fail(f"tensor {entry.name!r} overlaps the one before it")
        free = entry.offset + entry.size
        if start + free > size:
            raise cursor.fail(
                f"tensor {entry.name!r} ends at byte {start + free} of a file of {size}"
                " (truncated?)"
            )
