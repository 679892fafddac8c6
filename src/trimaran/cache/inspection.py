"""What lies in a prefix cache: for operators who ask what is shared and what is hot."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from trimaran.cache.prefix_index import Piece, PrefixIndex
from trimaran.core.namespace import Namespace

_SHOWN = 16  # first tokens of a prefix that are told


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """What is stored under one salt and adapter.

    Attributes:
        salt: a digest of the salt (see `Namespace.digest`), 32 hexadecimal digits; "" is that
            of requests that give none. A salt itself is never told: it may be a secret.
        prefixes: stored sequences that none other continues.
        blocks: that are stored, held or not.
        tokens: that can be found, those of common beginnings once; with an index of full
            blocks, those of all blocks.
        hits: sequences for which a beginning was found, of what is stored now.
    """

    salt: str
    adapter: str
    prefixes: int
    blocks: int
    tokens: int
    hits: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A stored beginning that many sequences had in common, and not more than it.

    Attributes:
        salt: a digest, as in `NamespaceReport`.
        tokens: its length.
        hits: sequences for which just these tokens were found.
        head: its first token ids; none of a salt's, whose prompts are its own.
    """

    salt: str
    adapter: str
    tokens: int
    hits: int
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cache at one moment.

    Attributes:
        block_size: tokens in a block.
        total, free, held, cached: blocks by state; free + held + cached = total.
        queried_tokens: of sequences that were looked up at their first admission.
        hit_tokens: those of them that were found.
        hit_rate: hit_tokens / queried_tokens; 0 before the first.
        namespaces: those with most blocks first.
        hottest: prefixes by hits, most first.
    """

    block_size: int
    total: int
    free: int
    held: int
    cached: int
    queried_tokens: int
    hit_tokens: int
    hit_rate: float
    namespaces: list[NamespaceReport]
    hottest: list[HotPrefix]


def namespaces_of(index: PrefixIndex) -> list[NamespaceReport]:
    """Sums of each namespace; O(stored blocks)."""
    sums: dict[Namespace, list[int]] = {}
    for piece in index.pieces():
        own = sums.setdefault(piece.namespace, [0, 0, 0, 0])
        own[0] += piece.last
        own[1] += piece.block is not None
        own[2] += piece.tokens
        own[3] += piece.hits
    found = [NamespaceReport(_shown(name), name.adapter, *own) for name, own in sums.items()]
    return sorted(found, key=lambda report: -report.blocks)


def hottest_of(index: PrefixIndex, top: int) -> list[HotPrefix]:
    """The `top` prefixes with most hits; O(stored blocks)."""

    def heat(piece: Piece) -> tuple[int, int]:
        return piece.hits, piece.end

    hot = heapq.nlargest(top, (piece for piece in index.pieces() if piece.hits), key=heat)
    return [
        HotPrefix(
            _shown(piece.namespace),
            piece.namespace.adapter,
            piece.end,
            piece.hits,
            ()
            if piece.namespace.salt
            else tuple(index.prefix(piece.below)[1][: min(_SHOWN, piece.end)]),
        )
        for piece in hot
    ]


def _shown(namespace: Namespace) -> str:
    return Namespace(namespace.salt).digest().hex() if namespace.salt else ""
