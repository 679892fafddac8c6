"""The file of a built model: a header in JSON, then data that is read into memory whole.

    0     "TRIMARAN"
    8     u32 version of this format, u32 zero
    16    u64 bytes of the header, u64 bytes of the file
    32    SHA-256 of the 32 bytes before and of the header
    64    header: a JSON object, filled up with spaces to a multiple of 4,096 bytes from 0
    ...   data: sections, each at a multiple of 64

All is little-endian. The header holds a checksum of each 4 MiB of data, so that every byte of
the file is under some sum, and threads verify what they have just read. The checksums find
accidents: truncation, a bad disk, a stray write. They are no signature; who can write the
file can also write sums that fit, as with any file of weights.

The data are read, not mapped. So they lie in huge pages, which a mapping of a file doesn't
get, and what was verified stays as it was whatever happens to the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.compute.native import _native
from trimaran.core.errors import BuildError, CapacityError, CheckpointError
from trimaran.models.json_file import parse_json_object

FORMAT = 1
MAX_HEADER_BYTES = 64 << 20
SECTION_ALIGNMENT = 64

_MAGIC = b"TRIMARAN"
_PRELUDE = struct.Struct("<8sIIQQ")
_HASHED_FROM = _PRELUDE.size
_HEADER_AT = 64
_PAGE = 4096
_PIECE = 4 << 20
_CHECKSUMS = "checksums"

Bytes = npt.NDArray[np.uint8]


def aligned(size: int) -> int:
    """`size` rounded up to where the next section may begin."""
    return -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


def write_container(path: Path, header: Mapping[str, Any], sections: Sequence[Bytes]) -> None:
    """Writes a new file and has it on the disk.

    Args:
        header: JSON values; sections are found by adding up their aligned sizes.

    Raises:
        OSError: it can't be written.
    """
    pieces = -(-sum(aligned(section.size) for section in sections) // _PIECE)
    # Sums have a fixed width, so the header's size is known before they are.
    data_at = _HEADER_AT + len(_encoded(header, [0] * pieces))
    with path.open("xb") as file:
        file.seek(data_at)
        sums = []
        for piece in _pieces(sections):
            sums.append(_native.checksum(piece))
            file.write(piece.data)
        size = file.tell()
        text = _encoded(header, sums)
        prelude = _PRELUDE.pack(_MAGIC, FORMAT, 0, len(text), size)
        file.seek(0)
        file.write(prelude + hashlib.sha256(prelude + text).digest() + text)
        file.flush()
        os.fsync(file.fileno())


def _encoded(header: Mapping[str, Any], sums: Sequence[int]) -> bytes:
    whole = {**header, _CHECKSUMS: [f"{value:016x}" for value in sums]}
    text = json.dumps(whole, allow_nan=False, ensure_ascii=False).encode()
    return text + b" " * (-(_HEADER_AT + len(text)) % _PAGE)


def _pieces(sections: Sequence[Bytes]) -> Any:
    """The data in pieces of `_PIECE` bytes, the last one shorter."""
    piece = np.zeros(_PIECE, np.uint8)
    filled = 0
    for section in sections:
        padded = aligned(section.size)
        at = 0
        while at < padded:
            count = min(padded - at, _PIECE - filled)
            own = section[at : at + count]
            piece[filled : filled + own.size] = own
            piece[filled + own.size : filled + count] = 0
            at += count
            filled += count
            if filled == _PIECE:
                yield piece
                filled = 0
    if filled:
        yield piece[:filled]


@dataclass(frozen=True, slots=True)
class Container:
    """An open file whose header has been verified; the data haven't been read yet."""

    path: Path
    header: Mapping[str, Any]
    data_at: int
    data_bytes: int

    @classmethod
    def open(cls, path: Path) -> Container:
        """Reads the header.

        Raises:
            BuildError: it can't be read, is no such file, of another format, truncated or
                corrupt.
        """
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(_HEADER_AT)
                header_bytes = _checked_prelude(path, start, size)
                text = file.read(header_bytes)
        except OSError as error:
            raise BuildError(f"{path} can't be read: {error.strerror or error}") from None
        prelude, digest = start[:_HASHED_FROM], start[_HASHED_FROM:]
        if hashlib.sha256(prelude + text).digest() != digest:
            raise _corrupt(path, "its header isn't what was written")
        try:
            header = parse_json_object(text, str(path))
        except CheckpointError as error:
            raise BuildError(str(error)) from None
        data_at = _HEADER_AT + header_bytes
        return cls(path, header, data_at, size - data_at)

    def read_data(self, threads: int) -> _native.WeightMemory:
        """The data, every byte verified.

        Raises:
            BuildError: the file has changed since it was written, or can't be read.
            CapacityError: there isn't enough memory for it.
        """
        sums = self._sums()
        try:
            memory = _native.WeightMemory(self.data_bytes)
        except MemoryError:
            raise CapacityError(
                f"there isn't enough memory for the {self.data_bytes} bytes of weights in"
                f" {self.path}; use a smaller model, or one that is quantised to fewer bits"
            ) from None
        array = memory.array()
        try:
            with self.path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
                jobs = [
                    pool.submit(self._read_piece, file.fileno(), array, index)
                    for index in range(len(sums))
                ]
                found = [job.result() for job in jobs]
        except OSError as error:
            raise BuildError(f"{self.path} can't be read: {error.strerror or error}") from None
        for index, value in enumerate(found):
            if value != sums[index]:
                at = self.data_at + index * _PIECE
                raise _corrupt(self.path, f"bytes {at} and following aren't what was written")
        return memory

    def _sums(self) -> list[int]:
        written = self.header.get(_CHECKSUMS)
        if not isinstance(written, list) or len(written) != -(-self.data_bytes // _PIECE):
            raise _corrupt(self.path, "it doesn't have a checksum for each piece of its data")
        try:
            return [int(value, 16) for value in written]
        except (TypeError, ValueError):
            raise _corrupt(self.path, "a checksum is no number") from None

    def _read_piece(self, handle: int, array: Bytes, index: int) -> int:
        at = index * _PIECE
        piece = array[at : at + _PIECE]
        done = 0
        while done < piece.size:
            count = os.preadv(handle, [piece[done:].data], self.data_at + at + done)
            if count == 0:
                raise _truncated(self.path, self.data_at + at + done)
            done += count
        return _native.checksum(piece)


def _checked_prelude(path: Path, start: bytes, size: int) -> int:
    """Bytes of the header."""
    if len(start) < _HEADER_AT:
        raise _truncated(path, size)
    magic, version, zero, header_bytes, written = _PRELUDE.unpack_from(start)
    if magic != _MAGIC:
        raise BuildError(f"{path} is not a built model")
    if version != FORMAT:
        raise BuildError(
            f"{path} is a build of format {version}, and this Trimaran reads format {FORMAT};"
            " build the model again"
        )
    if size < written:
        raise _truncated(path, size, written)
    data_at = _HEADER_AT + header_bytes
    if size > written or zero or header_bytes > MAX_HEADER_BYTES or data_at > size:
        raise _corrupt(path, "its sizes contradict each other")
    if data_at % _PAGE:
        raise _corrupt(path, "its data aren't aligned")
    return int(header_bytes)


def _truncated(path: Path, size: int, whole: int | None = None) -> BuildError:
    of = "" if whole is None else f" of {whole}"
    return BuildError(f"{path} is truncated: it has {size}{of} bytes; build the model again")


def _corrupt(path: Path, problem: str) -> BuildError:
    return BuildError(f"{path} is corrupt: {problem}; build the model again")
