"""A trie over tokens: hits are exact to the token at every block size.

Blocks of 4 tokens; | is the end of a block, and a run never goes over one:

    root ── t h e _ | ── c a ─┬─ t _ |  ── s a t           block 2, then 9 (partly filled)
            block 7           └─ n _ |  ── b e _ i |       block 5, then 8
                   └──── d o g _ |                         block 4

An edge is a run of tokens; where two sequences part, the run is split, at any token. A node
at the end of a block has the block that holds these tokens, and so has a node where a partly
filled last block ends. A node in the middle, as after "c a", has none: each block below it,
2 and 5, begins with its tokens.

A match follows the tokens down. Blocks that are wholly matched are shared. Where it ends
within a block, some block holds the tokens so far, whole or partly filled, held or not: it
is the source of a copy, and the copy is the sequence's own to go on with. A partly filled
block is stored when its sequence lets go of it, if nothing else holds its tokens; once a
longer block holds them too, it is spent and the first to be given up.

Runs are kept as bytes, four a token. They stay within a block, so that there is one node a
block in which its last use, its continuations and its priority are known: a long prefix is
a chain, not one edge, and matching it takes a look-up a block.

Cost: O(block size) a block to match or insert, with one look-up a run; O(log n) to evict
(see `EvictionOrder`). The source of a copy is found by going down at most a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from trimaran.cache.eviction import EvictionOrder
from trimaran.cache.prefix_index import Cursor, Match, Piece
from trimaran.core.namespace import Namespace

_WIDTH = array("i").itemsize  # bytes of a token
_AT_ONCE = 8  # blocks whose tokens are made bytes together: what is read ahead is little


class _Node:
    """A run of tokens that ends a block, a partly filled block, or where runs part.

    Attributes:
        run: bytes of its tokens; empty for a root.
        end: bytes from the beginning of its block to the end of the run.
        block: that ends here, or None.
        children: by the bytes of the first token of their runs; None without any.
        hits: sequences whose match ended just here.
    """

    __slots__ = ("block", "children", "end", "hits", "parent", "run")

    def __init__(self, parent: _Node | None, run: bytes, end: int, block: int | None) -> None:
        self.parent = parent
        self.run = run
        self.end = end
        self.block = block
        self.children: dict[bytes, _Node] | None = None
        self.hits = 0

    def adopt(self, child: _Node) -> None:
        """Makes `child` a child, in the place of one that begins with the same token."""
        child.parent = self
        if self.children is None:
            self.children = {}
        self.children[child.run[:_WIDTH]] = child

    def drop(self, child: _Node) -> None:
        """Takes a child away."""
        assert self.children is not None
        del self.children[child.run[:_WIDTH]]
        if not self.children:
            self.children = None


class _Root(_Node):
    """The empty prefix of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", 0, None)
        self.namespace = namespace


class RadixIndex:
    """Implements `PrefixIndex` for blocks of `block_size` tokens, the last one partly filled."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._full = block_size * _WIDTH
        self._roots: dict[Namespace, _Root] = {}
        self._by_block: dict[int, _Node] = {}
        self._order = EvictionOrder()

    # ------------------------------------------------------------------ match and insert

    def match(self, tokens: Sequence[int], namespace: Namespace, limit: int) -> Match:
        cursor = Cursor(namespace)
        blocks: list[int] = []
        node: _Node | None = self._roots.get(namespace)
        if node is None:
            return Match(0, blocks, cursor)
        size, full = self._block_size, self._full
        length, source = 0, None  # of the block in which the match ends
        for page in _pages(tokens, limit, size):
            children = node.children
            below = None if children is None else children.get(page[:_WIDTH])
            if below is not None and below.run == page:  # the usual case: one run, a whole block
                length = len(page)
            else:
                below, length = _descend(node, page)
            if length == full:
                assert below.block is not None
                blocks.append(below.block)
                node = cursor.place = below
                length = 0
                continue
            if length:
                source = _source(below)
                node = below if below.end == length else below.parent or below
            break
        cursor.blocks = len(blocks)
        partial = length // _WIDTH
        return Match(len(blocks) * size + partial, blocks, cursor, source, partial, node)

    def used(self, match: Match) -> None:
        if isinstance(match.found, _Node):
            match.found.hits += 1
        if match.source is not None:
            self._order.touch(match.source)

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        cursor.blocks += 1
        if cursor.closed:
            return block
        page = _bytes(tokens)
        node, length = _descend(self._place(cursor), page)
        if length < len(page):
            node = self._grow(node, page, length, block)
        assert node.block is not None
        cursor.place = node
        return node.block

    def insert_tail(self, cursor: Cursor, tokens: Sequence[int], block: int) -> None:
        if cursor.closed:
            return
        page = _bytes(tokens)
        node, length = _descend(self._place(cursor), page)
        if length < len(page):
            self._grow(node, page, length, block)
        else:
            self._order.touch(_source(node))

    # ------------------------------------------------------------------ holds and eviction

    def keep(self, block: int, priority: int, until: float | None) -> None:
        self._order.keep(block, priority, until)

    def at(self, now: float) -> None:
        self._order.at(now)

    def held(self, block: int) -> None:
        self._order.held(block)

    def unheld(self, block: int) -> None:
        self._order.unheld(block, leaf=self._is_leaf(self._by_block[block]))

    def evict(self) -> int:
        block = self._order.pop()
        node = self._by_block.pop(block)
        node.block = None
        parent = node.parent
        assert parent is not None
        if node.children is not None:  # a spent one: those below hold its tokens
            _join(node)
            return block
        parent.drop(node)
        if isinstance(parent, _Root):
            if parent.children is None:
                del self._roots[parent.namespace]
        elif parent.block is None:
            _join(parent)
        elif parent.children is None and parent.block in self._order:
            self._order.leaf(parent.block)
        return block

    def clear(self) -> list[int]:
        self._roots.clear()
        self._by_block.clear()
        return self._order.clear()

    # ------------------------------------------------------------------ state

    def prefix(self, block: int) -> tuple[Namespace, list[int]]:
        runs: list[bytes] = []
        node = self._by_block[block]
        while node.parent is not None:
            runs.append(node.run)
            node = node.parent
        assert isinstance(node, _Root)
        return node.namespace, _tokens(b"".join(reversed(runs)))

    def pieces(self) -> Iterator[Piece]:
        for namespace, root in self._roots.items():
            for node, end in _below(root):
                own, last = len(node.run) // _WIDTH, node.children is None
                yield Piece(namespace, end, own, node.block, _source(node), node.hits, last)

    @property
    def num_unheld(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def check(self) -> None:
        found: set[int] = set()
        for root in self._roots.values():
            _require(root.children is not None, "no root is empty")
            for node, _ in _below(root):
                self._check_node(node)
                if node.block is not None:
                    _require(node.block not in found, f"block {node.block} is stored once")
                    found.add(node.block)
        _require(found == self._by_block.keys(), "what is stored can be reached")
        unheld = {block for block in found if block in self._order}
        leaves = {block for block in unheld if self._is_leaf(self._by_block[block])}
        self._order.check(leaves, found)

    # ------------------------------------------------------------------ parts

    def _grow(self, node: _Node, page: bytes, length: int, block: int) -> _Node:
        """Stores `block`, of whose tokens `page` the first `length` bytes lead to or into the
        run of `node`. Blocks that end on the way are partly filled, and now spent."""
        if 0 < length < node.end:
            node = _split(node, length)
        leaf = _Node(node, page[length:], len(page), block)
        node.adopt(leaf)
        self._by_block[block] = leaf
        while not self._ends_block(node):
            if node.block is not None:
                self._order.spend(node.block)
            assert node.parent is not None
            node = node.parent
        return leaf

    def _ends_block(self, node: _Node) -> bool:
        """Whether the runs below it begin a block: it ends a full one, or is a root."""
        return node.end == self._full or node.parent is None

    def _is_leaf(self, node: _Node) -> bool:
        """Whether no stored block needs the one of `node`, as its continuation or its end."""
        return node.children is None or node.end < self._full

    def _place(self, cursor: Cursor) -> _Node:
        if isinstance(cursor.place, _Node):
            return cursor.place
        root = self._roots.get(cursor.namespace)
        if root is None:
            root = self._roots[cursor.namespace] = _Root(cursor.namespace)
        return root

    def _check_node(self, node: _Node) -> None:
        block, parent, children = node.block, node.parent, node.children
        assert parent is not None
        begin = 0 if self._ends_block(parent) else parent.end
        _require(node.end == begin + len(node.run) <= self._full, "a run stays within its block")
        _require(len(node.run) > 0, "no run is empty")
        _require(block is None or self._by_block.get(block) is node, f"block {block} is known")
        _require(children is None or len(children) > 0, "no children are no dictionary")
        _require(block is not None or len(children or ()) > 1, "a node without a block parts runs")
        _require(block is not None or node.end < self._full, "the end of a block has a block")
        for first, child in (children or {}).items():
            _require(child.parent is node and child.run.startswith(first), "children know")
        if block is not None and block not in self._order:  # held, and so is what is before it
            while not self._ends_block(parent):
                assert parent.parent is not None
                parent = parent.parent
            before = parent.block
            _require(
                before is None or before not in self._order, "a held block continues held ones"
            )


def _descend(node: _Node, page: bytes) -> tuple[_Node, int]:
    """Follows `page`, tokens of one block, from the node before it.

    Returns:
        The node to which or into whose run it leads, and how many bytes lead there.
    """
    at = 0
    while node.children is not None and at < len(page):
        child = node.children.get(page[at : at + _WIDTH])
        if child is None:
            break
        run, node = child.run, child
        if not page.startswith(run, at):
            return node, at + _common(run, page[at : at + len(run)])
        at += len(run)
    return node, at


def _common(one: bytes, two: bytes) -> int:
    """Bytes of the tokens with which both begin."""
    at = 0
    while at < min(len(one), len(two)) and one[at : at + _WIDTH] == two[at : at + _WIDTH]:
        at += _WIDTH
    return at


def _source(node: _Node) -> int:
    """A block that begins with the tokens of its block up to the end of `node`."""
    while node.block is None:
        assert node.children is not None
        node = next(iter(node.children.values()))
    return node.block


def _split(node: _Node, end: int) -> _Node:
    """Splits the run of `node` `end` bytes into its block; the node above, which is new."""
    parent = node.parent
    assert parent is not None
    cut = len(node.run) - (node.end - end)
    above = _Node(parent, node.run[:cut], end, None)
    parent.adopt(above)
    node.run = node.run[cut:]
    above.adopt(node)
    return above


def _join(node: _Node) -> None:
    """Joins a node that has no block with its child, if that is its only one."""
    children, parent = node.children, node.parent
    assert children is not None and parent is not None
    if len(children) == 1:
        (child,) = children.values()
        child.run = node.run + child.run
        parent.adopt(child)


def _below(root: _Node) -> Iterator[tuple[_Node, int]]:
    """All nodes under a root, each with the number of tokens up to its end."""
    waiting = [(root, 0)]
    while waiting:
        node, end = waiting.pop()
        if node is not root:
            yield node, end
        for child in (node.children or {}).values():
            waiting.append((child, end + len(child.run) // _WIDTH))


def _pages(tokens: Sequence[int], limit: int, size: int) -> Iterator[bytes]:
    """The tokens of each block of `tokens[:limit]`, the last one perhaps not full."""
    stride, full = size * _AT_ONCE, size * _WIDTH
    for start in range(0, limit, stride):
        part = _bytes(tokens[start : min(start + stride, limit)])
        for at in range(0, len(part), full):
            yield part[at : at + full]


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _tokens(run: bytes) -> list[int]:
    return array("i", run).tolist()


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"prefix index: it doesn't hold that {what}")
