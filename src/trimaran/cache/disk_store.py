"""The disk tier: a bounded folder of blocks that several processes share.

    PATH/trimaran-kv-1/
    ├── key                     32 random bytes that key all digests of this folder
    ├── usage                   bytes in use, as text; its lock guards the bound
    └── 3f/
        ├── 3fa9…e1.kv          a block, by its digest
        └── 3fa9…e1.77-0.part   one that is being written, locked by who writes it

    a block   "TRMKV001" | payload bytes u32 | CRC-32 u32 of digest and payload | digest 32 |
              payload

- A block appears by a rename, whole. It isn't forced to the disk: what a loss of power tears
  is found by the checksum.
- A file under a block's name that isn't just that block is removed when it is read. Files of
  other names are ignored, and never touched: the folder may be the user's.
- Used blocks get the present time; those used longest ago are removed first, down to nine
  tenths of the bound. Room is reserved under a lock before a block is written, so the bound
  holds for all processes together; one that dies between leaves the sum too high until the
  next removal, which counts anew.
- The folder is readable by its owner alone: a block tells what the conversation was about.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

FOLDER = "trimaran-kv-1"
KEY_BYTES = 32

_MAGIC = b"TRMKV001"
_HEADER = struct.Struct("<8sII32s")
_NAME = re.compile(r"[0-9a-f]{64}(\.kv|\.\d+-\d+\.part)")
_KEEP = 0.9  # of the bound, when blocks are removed


class DiskStore:
    """Blocks of one size by digest; every method is safe across threads and processes."""

    def __init__(self, path: Path, max_bytes: int, block_bytes: int) -> None:
        """
        Args:
            path: of the folder that holds this store's own; the caller has made it.
            max_bytes: of all blocks in it, those of other models too.
            block_bytes: of a payload.
        """
        self.folder = path / FOLDER
        self._root = str(self.folder)
        self.max_bytes = max_bytes
        self.block_bytes = block_bytes
        self.file_bytes = _HEADER.size + block_bytes
        self._numbers = itertools.count()

    def open(self, fresh_key: bytes) -> bytes:
        """Makes the folder where it isn't there; the key of its digests.

        Args:
            fresh_key: 32 random bytes, for a folder that has none.

        Raises:
            OSError: it can't be made, read or written.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        place = self.folder / "key"
        if not place.exists():
            draft = self.folder / f"key.{os.getpid()}-{next(self._numbers)}"
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                f.write(fresh_key)
            with suppress(FileExistsError):  # another process was faster
                os.link(draft, place)
            draft.unlink()
        with self._locked_usage():
            self._write_usage(self._trim(self.max_bytes))
        key = place.read_bytes()
        if len(key) != KEY_BYTES:
            raise OSError(
                errno.EINVAL, f"the key has {len(key)} bytes, not {KEY_BYTES}", str(place)
            )
        return key

    # ------------------------------------------------------------------ blocks

    def has(self, digest: bytes) -> bool:
        """Whether there is a file of that name and size: one look at the folder."""
        try:
            return os.stat(self._place(digest)).st_size == self.file_bytes
        except OSError:
            return False

    def read(self, digest: bytes) -> Bytes | None:
        """A block, and notes that it was used; None where it isn't here. What is here under
        its name and isn't it is removed."""
        place = self._place(digest)
        buffer = np.empty(self.file_bytes, np.uint8)
        try:
            with open(place, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                read = file.readinto(buffer) if size == self.file_bytes else 0  # type: ignore[arg-type]
                os.utime(file.fileno())
        except OSError:
            return None
        payload = buffer[_HEADER.size :]
        head = _header(digest, payload) if read == self.file_bytes else b""
        if buffer[: _HEADER.size].tobytes() != head:
            self._remove(place)
            return None
        return payload

    def touch(self, digest: bytes) -> bool:
        """Notes that a block was used; False where it isn't here."""
        try:
            os.utime(self._place(digest))
        except OSError:
            return False
        return True

    def write(self, digest: bytes, payload: Bytes) -> None:
        """Stores a block, which may be here already.

        Raises:
            OSError: it can't be written; nothing is left of it.
        """
        if self.touch(digest):
            return
        place = self._place(digest)
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(place), 0o700)
        part = f"{place.removesuffix('.kv')}.{os.getpid()}-{next(self._numbers)}.part"
        number = self._reserve(part)
        try:
            try:
                _write_all(number, _header(digest, payload), payload)
                os.rename(part, place)
            finally:
                os.close(number)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            self._give_back(self.file_bytes)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes that all processes have in use or reserved; at least what the files have."""
        try:
            return int((self.folder / "usage").read_text() or 0)
        except (OSError, ValueError):
            return 0

    # ------------------------------------------------------------------ parts

    def _place(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._root}/{name[:2]}/{name}.kv"

    def _remove(self, place: str) -> None:
        with suppress(OSError):
            size = os.stat(place).st_size
            os.unlink(place)
            self._give_back(size)

    def _reserve(self, part: str) -> int:
        """Makes room and an empty part of full size; its file, locked. Whoever makes room
        counts the parts that there are, so none is made outside the lock."""
        with self._locked_usage() as used:
            if used + self.file_bytes > self.max_bytes:
                used = self._trim(int(self.max_bytes * _KEEP) - self.file_bytes)
                self._write_usage(used)
            if used + self.file_bytes > self.max_bytes:
                raise OSError(errno.ENOSPC, "no room within kv_disk_bytes", str(self.folder))
            number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(number, self.file_bytes)
                self._write_usage(used + self.file_bytes)
            except BaseException:
                os.close(number)
                os.unlink(part)
                raise
            return number

    def _give_back(self, size: int) -> None:
        with suppress(OSError), self._locked_usage() as used:
            self._write_usage(max(0, used - size))

    @contextmanager
    def _locked_usage(self) -> Iterator[int]:
        """The bytes in use, while no other process or thread can change them."""
        number = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            text = os.read(number, 32)
            yield int(text) if text.isdigit() else self._sizes()
        finally:
            os.close(number)

    def _write_usage(self, used: int) -> None:
        with open(self.folder / "usage", "r+b", buffering=0) as file:
            file.write(str(used).encode().rjust(20, b"0"))

    def _sizes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _trim(self, wanted: int) -> int:
        """Removes parts whose writer is dead, then what was used longest ago until at most
        `wanted` bytes are left; the bytes that are."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, place in files:
            part = place.endswith(".part")
            if _abandoned(place) if part else total > wanted:
                with suppress(OSError):
                    os.unlink(place)
                    total -= size
        return total

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(time of last use, size, path) of every block and part."""
        for shard in _scan(str(self.folder)):
            if len(shard.name) != 2 or not shard.is_dir(follow_symlinks=False):
                continue
            for entry in _scan(shard.path):
                if _NAME.fullmatch(entry.name):
                    with suppress(OSError):
                        stat = entry.stat(follow_symlinks=False)
                        yield stat.st_mtime_ns, stat.st_size, entry.path


def _write_all(number: int, header: bytes, payload: Bytes) -> None:
    left = [memoryview(header), payload.data.cast("B")]
    while left:
        written = os.writev(number, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _header(digest: bytes, payload: Bytes) -> bytes:
    checksum = zlib.crc32(payload.data, zlib.crc32(digest))
    return _HEADER.pack(_MAGIC, payload.nbytes, checksum, digest)


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _abandoned(part: str) -> bool:
    """Whether nobody writes it any more: its lock went with its writer."""
    try:
        number = os.open(part, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(number)
    return True
