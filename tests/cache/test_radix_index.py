"""The trie, one rule at a time. That they hold together is shown by `test_index_machine`."""

from __future__ import annotations

import pytest

from trimaran.cache.prefix_index import Cursor, Match
from trimaran.cache.radix_index import RadixIndex
from trimaran.core.namespace import Namespace

HERE = Namespace()


def fill(
    index: RadixIndex, tokens: list[int], blocks: list[int], namespace: Namespace = HERE
) -> Cursor:
    """Stores `tokens` in blocks of 4, the last one perhaps partly filled; all are held."""
    cursor = Cursor(namespace)
    for place, block in enumerate(blocks):
        part = tokens[place * 4 : place * 4 + 4]
        if len(part) == 4:
            index.insert(cursor, part, block)
        else:
            index.insert_tail(cursor, part, block)
    return cursor


def rest(index: RadixIndex, *blocks: int) -> None:
    for block in blocks:
        index.unheld(block)
    index.check()


def found(match: Match) -> tuple[int, list[int], int | None, int]:
    return match.tokens, match.blocks, match.source, match.partial


def test_a_hit_is_exact_to_the_token() -> None:
    index = RadixIndex(4)
    fill(index, list(range(10)), [7, 8, 9])
    tokens = list(range(12))
    assert [index.match(tokens, HERE, limit).tokens for limit in range(13)] == [
        *range(11), 10, 10,
    ]  # fmt: skip
    assert found(index.match(tokens, HERE, 8)) == (8, [7, 8], None, 0)
    assert found(index.match(tokens, HERE, 7)) == (7, [7], 8, 3)
    assert found(index.match(tokens, HERE, 12)) == (10, [7, 8], 9, 2)
    assert found(index.match([0, 1, 99, 3], HERE, 4)) == (2, [], 7, 2)
    assert found(index.match([99], HERE, 1)) == (0, [], None, 0)


def test_runs_part_at_any_token() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5, 6], [0, 1])
    fill(index, [1, 2, 3, 5, 7], [2, 3])
    fill(index, [1, 2, 9, 9], [4])
    index.check()
    assert found(index.match([1, 2, 3, 4, 5, 6, 7], HERE, 7)) == (6, [0], 1, 2)
    assert found(index.match([1, 2, 3, 5, 7, 7], HERE, 6)) == (5, [2], 3, 1)
    assert index.match([1, 2, 3, 8], HERE, 4).tokens == 3
    assert index.match([1, 2, 8, 8], HERE, 4).tokens == 2
    assert index.prefix(3) == (HERE, [1, 2, 3, 5, 7])


def test_namespaces_never_share() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5], [0, 1], Namespace("tenant"))
    fill(index, [1, 2, 3, 4, 5], [2, 3], Namespace("", "tenant"))
    assert index.match([1, 2, 3, 4, 5], HERE, 5).tokens == 0
    assert index.match([1, 2, 3, 4, 5], Namespace("tenant"), 5).blocks == [0]
    assert index.match([1, 2, 3, 4, 5], Namespace("", "tenant"), 5).source == 3
    rest(index, 1, 0, 3, 2)
    assert [index.evict() for _ in range(4)] == [1, 0, 3, 2]
    assert (len(index), index.num_unheld, index._roots) == (0, 0, {})


def test_an_equal_block_is_stored_once() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5, 6], [0, 1])
    cursor = Cursor(HERE)
    assert index.insert(cursor, [1, 2, 3, 4], 8) == 0
    index.insert_tail(cursor, [5, 6], 9)
    index.insert_tail(cursor, [5], 9)
    assert (8 in index, 9 in index, len(index)) == (False, False, 2)


def test_a_longer_block_makes_a_partly_filled_one_spent() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5], [0, 1])
    fill(index, [9, 9, 9, 9], [2])
    rest(index, 2, 1, 0)
    fill(index, [1, 2, 3, 4, 5, 6, 7], [0, 3])
    rest(index, 3)
    assert index.evict() == 1  # though 2 is older
    index.check()
    assert index.match([1, 2, 3, 4, 5, 6, 7, 8], HERE, 8).tokens == 7
    assert [index.evict() for _ in range(3)] == [2, 3, 0]


def test_evicting_one_of_two_joins_the_run_again() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4], [0])
    fill(index, [1, 2, 5, 6], [1])
    assert len(list(index.pieces())) == 3
    rest(index, 0, 1)
    assert index.evict() == 0
    index.check()
    assert [(p.end, p.tokens, p.block) for p in index.pieces()] == [(4, 4, 1)]
    assert found(index.match([1, 2, 3, 4], HERE, 4)) == (2, [], 1, 2)


def test_what_is_copied_is_young() -> None:
    index = RadixIndex(4)
    for block in range(3):
        fill(index, [block, 1, 2], [block])
        rest(index, block)
    index.used(index.match([0, 1, 7], HERE, 3))
    assert [index.evict() for _ in range(3)] == [1, 2, 0]


def test_hits_are_counted_where_they_end() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5, 6], [0, 1])
    fill(index, [1, 2, 3, 4, 5, 7], [0, 2])
    for tokens in ([1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4]):
        index.used(index.match(tokens, HERE, len(tokens)))
    assert {piece.end: piece.hits for piece in index.pieces() if piece.hits} == {4: 1, 5: 2, 6: 1}


def test_clear_returns_the_unheld_blocks() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5], [0, 1])
    rest(index, 1)
    assert index.clear() == [1]
    assert (len(index), index.num_unheld, list(index.pieces())) == (0, 0, [])
    assert index.match([1, 2, 3, 4, 5], HERE, 5).tokens == 0
    index.check()


def test_nothing_goes_after_a_closed_cursor() -> None:
    index = RadixIndex(4)
    cursor = Cursor(HERE, closed=True)
    assert index.insert(cursor, [1, 2, 3, 4], 0) == 0
    index.insert_tail(cursor, [5], 1)
    assert (cursor.blocks, len(index)) == (1, 0)


def test_check_finds_a_held_block_after_an_unheld_one() -> None:
    index = RadixIndex(4)
    fill(index, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    index.unheld(0)
    with pytest.raises(AssertionError, match="a held block continues held ones"):
        index.check()
