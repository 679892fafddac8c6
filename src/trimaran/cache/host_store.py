"""The host tier: blocks in main memory, the least recently used given up first."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class HostStore:
    """At most `max_bytes` of blocks by digest; safe across threads.

    An array that was put in is never written again: who has got it can read it also once it
    has been given up here.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, Bytes] = OrderedDict()  # least recently used first
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def put(self, digest: bytes, data: Bytes) -> bool:
        """Takes a block in, or notes that it was used; False where it is larger than all."""
        with self._lock:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)
                return True
            if data.nbytes > self.max_bytes:
                return False
            while self._bytes + data.nbytes > self.max_bytes:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes
            self._blocks[digest] = data
            self._bytes += data.nbytes
            return True

    def get(self, digest: bytes) -> Bytes | None:
        """A block, not to be written to; None where it isn't here."""
        with self._lock:
            data = self._blocks.get(digest)
            if data is not None:
                self._blocks.move_to_end(digest)
            return data

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._bytes = 0

    def check(self) -> None:
        """Raises `AssertionError` where the sum is wrong or too large."""
        with self._lock:
            total = sum(data.nbytes for data in self._blocks.values())
            if total != self._bytes or total > self.max_bytes:
                raise AssertionError(f"{total} bytes held, {self._bytes} counted")
