"""An index of full blocks by chained hashes.

    root(namespace) ── block 7 "the cat sat" ── block 2 "on the mat" ── block 9 ...
                                            └── block 4 "under a tree"

A block's key hashes its own tokens and the key of the block before it, so one look-up in a
flat table finds it. A hit counts only when the tokens are equal and the block before is the
one that was just found: by induction the whole prefix is equal, and a collision of keys
costs a missed hit and never a wrong one.

Only full blocks are stored, so of a common prefix up to a block less one token is computed
again.

Cost: O(block size) a block to match or insert, O(log n) to evict (see `EvictionOrder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trimaran.cache.eviction import EvictionOrder
from trimaran.cache.prefix_index import Cursor, Match, Piece
from trimaran.core.namespace import Namespace

BlockHash = Callable[[int, tuple[int, ...]], int]


def block_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Key of a block: of the key of the block before it and its own tokens.

    Python's hash of integers is the same in every process.
    """
    return hash((parent, tokens))


class _Node:
    """One stored block; a root has no block and stands for the empty prefix of a namespace."""

    __slots__ = ("block", "children", "end", "hits", "key", "namespace", "parent", "tokens")

    def __init__(
        self,
        key: int,
        parent: _Node | None,
        tokens: tuple[int, ...],
        block: int,
        namespace: Namespace,
    ) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.namespace = namespace
        self.children = 0
        self.hits = 0
        self.end: int = 0 if parent is None else parent.end + len(tokens)


class HashIndex:
    """Implements `PrefixIndex` for full blocks of `block_size` tokens.

    Args:
        hash_tokens: makes the keys; another one is for tests of collisions.
    """

    def __init__(self, block_size: int, hash_tokens: BlockHash = block_hash) -> None:
        self._block_size = block_size
        self._hash = hash_tokens
        self._roots: dict[Namespace, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by key
        self._by_block: dict[int, _Node] = {}
        self._order = EvictionOrder()

    def match(self, tokens: Sequence[int], namespace: Namespace, limit: int) -> Match:
        cursor = Cursor(namespace)
        blocks: list[int] = []
        node = self._roots.get(namespace)
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
        return Match(len(blocks) * self._block_size, blocks, cursor, found=cursor.place)

    def used(self, match: Match) -> None:
        if isinstance(match.found, _Node):
            match.found.hits += 1

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        cursor.blocks += 1
        if cursor.closed:
            return block
        parent = self._place(cursor)
        chunk = tuple(tokens)
        key = self._hash(parent.key, chunk)
        found = self._nodes.get(key)
        if found is None:
            found = _Node(key, parent, chunk, block, cursor.namespace)
            self._nodes[key] = self._by_block[block] = found
            parent.children += 1
        elif found.parent is not parent or found.tokens != chunk:
            cursor.closed = True
            self._forget_empty_root(parent)
            return block
        cursor.place = found
        return found.block

    def insert_tail(self, cursor: Cursor, tokens: Sequence[int], block: int) -> None:
        """A partly filled block has no key."""

    def keep(self, block: int, priority: int, until: float | None) -> None:
        self._order.keep(block, priority, until)

    def at(self, now: float) -> None:
        self._order.at(now)

    def held(self, block: int) -> None:
        self._order.held(block)

    def unheld(self, block: int) -> None:
        self._order.unheld(block, leaf=self._by_block[block].children == 0)

    def evict(self) -> int:
        block = self._order.pop()
        node = self._by_block.pop(block)
        del self._nodes[node.key]
        parent = node.parent
        assert parent is not None
        parent.children -= 1
        if parent.children == 0 and parent.block in self._order:
            self._order.leaf(parent.block)
        self._forget_empty_root(parent)
        return block

    def clear(self) -> list[int]:
        for part in (self._roots, self._nodes, self._by_block):
            part.clear()
        return self._order.clear()

    def prefix(self, block: int) -> tuple[Namespace, list[int]]:
        parts: list[tuple[int, ...]] = []
        node = self._by_block[block]
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return node.namespace, [token for part in reversed(parts) for token in part]

    def pieces(self) -> Iterator[Piece]:
        size = self._block_size
        for node in self._nodes.values():
            last = node.children == 0
            yield Piece(node.namespace, node.end, size, node.block, node.block, node.hits, last)

    @property
    def num_unheld(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

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
        leaves = {n.block for n in self._nodes.values() if not n.children}
        unheld = {block for block in self._by_block if block in self._order}
        for block in self._by_block.keys() - unheld:
            before = self._by_block[block].parent
            _require(
                before is None or before.parent is None or before.block not in unheld,
                f"who holds block {block} holds the one before it",
            )
        self._order.check(leaves & unheld, set(self._by_block))

    def _place(self, cursor: Cursor) -> _Node:
        if isinstance(cursor.place, _Node):
            return cursor.place
        root = self._roots.get(cursor.namespace)
        if root is None:
            key = int.from_bytes(cursor.namespace.digest()[:8], "little")
            root = self._roots[cursor.namespace] = _Node(key, None, (), -1, cursor.namespace)
        return root

    def _forget_empty_root(self, node: _Node) -> None:
        if node.parent is None and node.children == 0:
            del self._roots[node.namespace]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"prefix index: it doesn't hold that {what}")
