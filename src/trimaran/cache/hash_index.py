"""An index of full blocks by chained hashes.

    root(salt) ── block 7 "the cat sat" ── block 2 "on the mat" ── block 9 ...
                                       └── block 4 "under a tree"

A block's key hashes its own tokens and the key of the block before it, so one look-up in a
flat table finds it. A hit counts only when the tokens are equal and the block before is the
one that was just found: by induction the whole prefix is equal, and a collision of keys
costs a missed hit and never a wrong one.

Cost: O(block size) a block to match or insert, O(1) to evict. Eviction needs no search for
a leaf: whoever holds a block holds all before it (see `PrefixIndex.insert`) and lets go of
the last one first, so among unheld blocks in order of release each comes before the one it
continues, and the oldest is always a leaf.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from trimaran.cache.prefix_index import Cursor, Match

BlockHash = Callable[[int, tuple[int, ...]], int]


def block_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Key of a block: of the key of the block before it and its own tokens.

    Python's hash of integers is the same in every process.
    """
    return hash((parent, tokens))


class _Node:
    """One stored block; a root has no block and stands for the empty prefix of a salt."""

    __slots__ = ("block", "children", "key", "parent", "salt", "tokens")

    def __init__(
        self, key: int, parent: _Node | None, tokens: tuple[int, ...], block: int, salt: str
    ) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.salt = salt
        self.children = 0


class HashIndex:
    """Implements `PrefixIndex` for full blocks of `block_size` tokens.

    Args:
        hash_tokens: makes the keys; another one is for tests of collisions.
    """

    def __init__(self, block_size: int, hash_tokens: BlockHash = block_hash) -> None:
        self._block_size = block_size
        self._hash = hash_tokens
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by key
        self._by_block: dict[int, _Node] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> Match:
        cursor = Cursor(salt)
        blocks: list[int] = []
        node = self._roots.get(salt)
        if node is not None:
            size = self._block_size
            for start in range(0, limit - size + 1, size):
                chunk = tuple(tokens[start : start + size])
                found = self._nodes.get(self._hash(node.key, chunk))
                if found is None or found.parent is not node or found.tokens != chunk:
                    break
                blocks.append(found.block)
                node = cursor.place = found
        cursor.blocks = len(blocks)
        return Match(len(blocks) * self._block_size, blocks, cursor)

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        cursor.blocks += 1
        if cursor.closed:
            return block
        parent = self._place(cursor)
        chunk = tuple(tokens)
        key = self._hash(parent.key, chunk)
        found = self._nodes.get(key)
        if found is None:
            found = _Node(key, parent, chunk, block, cursor.salt)
            self._nodes[key] = self._by_block[block] = found
            parent.children += 1
        elif found.parent is not parent or found.tokens != chunk:
            cursor.closed = True
            self._forget_empty_root(parent)
            return block
        cursor.place = found
        return found.block

    def held(self, block: int) -> None:
        del self._unheld[block]

    def unheld(self, block: int) -> None:
        self._unheld[block] = None

    def evict(self) -> int:
        block, _ = self._unheld.popitem(last=False)
        node = self._by_block.pop(block)
        del self._nodes[node.key]
        assert node.parent is not None
        node.parent.children -= 1
        self._forget_empty_root(node.parent)
        return block

    def clear(self) -> list[int]:
        unheld = list(self._unheld)
        for part in (self._roots, self._nodes, self._by_block, self._unheld):
            part.clear()
        return unheld

    @property
    def num_unheld(self) -> int:
        return len(self._unheld)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def prefix(self, block: int) -> tuple[str, list[int]]:
        """(salt, tokens) up to the end of a stored block: for inspection and tests."""
        parts: list[tuple[int, ...]] = []
        node = self._by_block[block]
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return node.salt, [token for part in reversed(parts) for token in part]

    def check(self) -> None:
        children = dict.fromkeys([*self._nodes.values(), *self._roots.values()], 0)
        _require(len(self._nodes) == len(self._by_block), "as many keys as blocks")
        for key, node in self._nodes.items():
            _require(node.key == key, f"block {node.block} is stored under its key")
            _require(self._by_block.get(node.block) is node, f"block {node.block} is known")
            _require(node.parent in children, f"what block {node.block} continues is stored")
            assert node.parent is not None
            children[node.parent] += 1
        for node, count in children.items():
            _require(node.children == count, f"block {node.block} counts its children")
        _require(all(root.children for root in self._roots.values()), "no root is empty")
        seen: set[int] = set()
        for block in self._unheld:  # each after all that continue it
            node = self._by_block[block]
            _require(node.parent is None or node.parent.block not in seen, "leaves come first")
            seen.add(block)

    def _place(self, cursor: Cursor) -> _Node:
        if isinstance(cursor.place, _Node):
            return cursor.place
        root = self._roots.get(cursor.salt)
        if root is None:
            digest = hashlib.blake2b(cursor.salt.encode(), digest_size=8).digest()
            root = _Node(int.from_bytes(digest, "little"), None, (), -1, cursor.salt)
            self._roots[cursor.salt] = root
        return root

    def _forget_empty_root(self, node: _Node) -> None:
        if node.parent is None and node.children == 0:
            del self._roots[node.salt]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"prefix index: it doesn't hold that {what}")
