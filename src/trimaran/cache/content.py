"""What lies in stored blocks, named by a hash that is equal wherever the content is.

    root   = H(space, salt, adapter)
    digest = H(digest of the block before it, or the root; its tokens)

H is BLAKE2b with 256 bits, keyed where a key is given. The space says which bits a block of
these tokens has: model, kernels, KV format, block size. So blocks of equal digests can stand
for each other, in any tier and in any process; the key keeps one who sees only digests from
guessing tokens or a salt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trimaran.core.namespace import Namespace

DIGEST_BYTES = 32


class ContentHash:
    """Makes digests; O(tokens), about a microsecond a block of 16."""

    def __init__(self, space: bytes = b"", key: bytes = b"") -> None:
        """
        Args:
            space: what else than tokens, adapter and salt decides the bits of a block.
            key: at most 64 bytes.
        """
        self._space = space
        self._key = key

    def root(self, namespace: Namespace) -> bytes:
        """32 bytes that stand for the empty prefix."""
        parts = (self._space, *(part.encode() for part in namespace))
        return self._hash(b"root", *(struct.pack("<Q", len(part)) + part for part in parts))

    def after(self, before: bytes, tokens: Sequence[int]) -> bytes:
        """32 bytes that stand for a full block of `tokens` after the prefix `before`."""
        return self._hash(b"block", before, struct.pack(f"<{len(tokens)}i", *tokens))

    def chain(
        self, before: bytes, tokens: Sequence[int], start: int, stop: int, size: int
    ) -> Iterator[bytes]:
        """Digests of the blocks at places `start` to `stop` - 1 of a sequence; `before` is
        that of the block before the first, or the root."""
        for place in range(start, stop):
            before = self.after(before, tokens[place * size : (place + 1) * size])
            yield before

    def _hash(self, kind: bytes, *parts: bytes) -> bytes:
        data = b"".join(parts)
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=kind).digest()


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A full block of the prefix index; another object each time a block is stored anew.

    Attributes:
        block: where it lies.
        digest: of its content and all before it.
        before: the digest of the block that it continues; None for a first block.
        tokens: its own.
        uses: how often it was computed or found.
        persisted: it is on the disk, or asked to be.
    """

    block: int
    digest: bytes
    before: bytes | None
    tokens: tuple[int, ...]
    uses: int = 1
    persisted: bool = False


class BlockObserver(Protocol):
    """Is told what the prefix index stores and gives up, on the engine's thread, at once:
    before a block that was given up can be written."""

    def stored(self, stored: StoredBlock) -> None: ...

    def used(self, found: Sequence[StoredBlock]) -> None:
        """A sequence was admitted with this prefix, in order."""
        ...

    def removed(self, stored: StoredBlock) -> None: ...

    def cleared(self) -> None:
        """Everything was given up at once."""
        ...


class StoredBlocks:
    """Which block holds which content; hands on what changes to observers.

    `at` may be called from any thread. Whoever copies a stored block without holding it asks
    before and after: where both answers are the same object, nobody wrote in between.
    """

    def __init__(self, block_size: int, content: ContentHash) -> None:
        self.block_size = block_size
        self.content = content
        self.observers: list[BlockObserver] = []
        self._stored: dict[int, StoredBlock] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[StoredBlock]:
        return iter(self._stored.values())

    def at(self, block: int) -> StoredBlock | None:
        """What is stored there."""
        return self._stored.get(block)

    def add(
        self, block: int, before: int | None, tokens: Sequence[int], namespace: Namespace
    ) -> None:
        """A full block was indexed; known ones are passed over.

        Args:
            before: the stored block that it continues; None for a first one.
        """
        if block in self._stored:
            return
        if before is None:
            parent, root = None, self.content.root(namespace)
        else:
            parent = root = self._stored[before].digest
        digest = self.content.after(root, tokens)
        stored = StoredBlock(block, digest, parent, tuple(tokens))
        self._stored[block] = stored
        for observer in self.observers:
            observer.stored(stored)

    def use(self, blocks: Sequence[int]) -> None:
        """A sequence was admitted with these full blocks."""
        found = [self._stored[block] for block in blocks if block in self._stored]
        for stored in found:
            stored.uses += 1
        if found:
            for observer in self.observers:
                observer.used(found)

    def remove(self, block: int) -> None:
        """A block was given up; unknown ones are ignored."""
        stored = self._stored.pop(block, None)
        if stored is not None:
            for observer in self.observers:
                observer.removed(stored)

    def clear(self) -> None:
        """The index was cleared."""
        self._stored.clear()
        for observer in self.observers:
            observer.cleared()
