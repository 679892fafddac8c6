"""The index against the plain definition: the longest stored prefix of full blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cache.hash_index import HashIndex, block_hash
from trimaran.cache.prefix_index import Cursor, NoIndex, PrefixIndex
from trimaran.core.namespace import Namespace

SEQUENCES = st.lists(
    st.tuples(
        st.sampled_from([Namespace(), Namespace("tenant"), Namespace("", "tenant")]),
        st.lists(st.integers(0, 1), max_size=12),
        st.sampled_from(["store", "match", "evict"]),
    ),
    max_size=40,
)


def longest(
    stored: set[tuple[Namespace, tuple[int, ...]]], salt: Namespace, tokens: list[int]
) -> int:
    hit = 0
    for end in range(2, len(tokens) + 1, 2):
        if (salt, tuple(tokens[:end])) not in stored:
            break
        hit = end
    return hit


@given(operations=SEQUENCES, keys=st.sampled_from([None, 3, 40]))
def test_match_is_the_longest_stored_prefix(
    operations: list[tuple[Namespace, list[int], str]], keys: int | None
) -> None:
    index = HashIndex(2, block_hash if keys is None else lambda p, t: block_hash(p, t) % keys)
    stored: set[tuple[Namespace, tuple[int, ...]]] = set()
    fresh = iter(range(10_000))
    for salt, tokens, operation in operations:
        if operation == "store":
            found = index.match(tokens, salt, len(tokens))
            for block in found.blocks:
                index.held(block)
            held, cursor = list(found.blocks), found.cursor
            for start in range(found.tokens, len(tokens) - 1, 2):
                block = next(fresh)
                assert index.insert(cursor, tokens[start : start + 2], block) == block
                if block in index:
                    held.append(block)
                    stored.add((salt, tuple(tokens[: start + 2])))
                else:
                    assert keys is not None and cursor.closed
            for block in reversed(held):
                index.unheld(block)
        elif operation == "evict" and index.num_unheld:
            before = {block for block in range(next(fresh)) if block in index}
            prefixes = {block: index.prefix(block) for block in before}
            block = index.evict()
            salt_, gone = prefixes[block]
            stored.remove((salt_, tuple(gone)))
            assert not any(s == salt_ and tuple(gone) == t[: len(gone)] for s, t in stored), (
                "a block was evicted before one that continues it"
            )
        found = index.match(tokens, salt, len(tokens))
        assert found.tokens == longest(stored, salt, tokens) == 2 * len(found.blocks)
        for number, block in enumerate(found.blocks):
            assert index.prefix(block) == (salt, tokens[: 2 * number + 2])
        assert len(index) == len(stored)
        index.check()


def fill(index: PrefixIndex, tokens: list[int], first_block: int, salt: str = "") -> Cursor:
    cursor = Cursor(Namespace(salt))
    for start in range(0, len(tokens), 2):
        index.insert(cursor, tokens[start : start + 2], first_block + start // 2)
    return cursor


def test_the_limit_is_respected_and_partial_blocks_are_not_found() -> None:
    index = HashIndex(2)
    fill(index, [1, 2, 3, 4, 5, 6], 10)
    tokens = [1, 2, 3, 4, 5, 6]
    hits = [index.match(tokens, Namespace(), limit).tokens for limit in range(7)]
    assert hits == [0, 0, 2, 2, 4, 4, 6]
    assert index.match([1, 2, 3, 9, 5, 6], Namespace(), 6).blocks == [10]
    assert index.match([2, 3, 4, 5], Namespace(), 4).blocks == []


def test_an_equal_block_is_stored_once() -> None:
    index = HashIndex(2)
    fill(index, [1, 2, 3, 4], 10)
    cursor = Cursor(Namespace())
    assert index.insert(cursor, [1, 2], 20) == 10
    assert index.insert(cursor, [3, 4], 21) == 11
    assert index.insert(cursor, [5, 6], 22) == 22
    assert index.match([1, 2, 3, 4, 5, 6], Namespace(), 6).blocks == [10, 11, 22]
    assert 20 not in index
    assert len(index) == 3


def test_salts_never_share() -> None:
    index = HashIndex(2)
    fill(index, [1, 2], 10, "a")
    assert index.match([1, 2], Namespace(), 2).tokens == 0
    assert index.match([1, 2], Namespace("b"), 2).tokens == 0
    fill(index, [1, 2], 20, "b")
    assert index.match([1, 2], Namespace("a"), 2).blocks == [10]
    assert index.match([1, 2], Namespace("b"), 2).blocks == [20]


def test_when_all_keys_collide_hits_are_missed_and_never_wrong() -> None:
    index = HashIndex(2, lambda parent, tokens: 7)
    fill(index, [1, 2, 3, 4], 10)
    other = fill(index, [5, 6], 20)
    assert other.closed
    assert len(index) == 1
    assert index.match([1, 2, 3, 4], Namespace(), 4).blocks == [10]
    assert index.match([5, 6], Namespace(), 2).blocks == []
    assert index.match([1, 2], Namespace("salt"), 2).blocks == []
    index.check()


def test_eviction_takes_the_oldest_sequence_from_its_end() -> None:
    index = HashIndex(2)
    fill(index, [1, 2, 3, 4], 10)
    fill(index, [1, 2, 5, 6], 20)  # its first block is 10 too
    for block in (11, 21, 10):
        index.unheld(block)
    assert [index.evict() for _ in range(3)] == [11, 21, 10]
    assert (len(index), index.num_unheld) == (0, 0)
    index.check()


def test_clear_returns_the_unheld_blocks() -> None:
    index = HashIndex(2)
    fill(index, [1, 2, 3, 4], 10)
    index.unheld(11)
    assert index.clear() == [11]
    assert (len(index), index.num_unheld) == (0, 0)
    assert index.match([1, 2, 3, 4], Namespace(), 4).tokens == 0
    index.check()


def test_keys_depend_on_every_token_and_on_the_block_before() -> None:
    keys = {
        block_hash(parent, tokens)
        for parent in (0, 1)
        for tokens in ((1, 2), (2, 1), (1,), (1, 2, 0), (0, 1, 2))
    }
    assert len(keys) == 10


def test_check_finds_a_wrong_count_and_a_wrong_order() -> None:
    index = HashIndex(2)
    fill(index, [1, 2, 3, 4], 10)
    index.unheld(10)  # before the block that continues it
    with pytest.raises(AssertionError, match="who holds block 11 holds the one before it"):
        index.check()
    index.unheld(11)
    index.check()
    index._by_block[10].children = 0
    with pytest.raises(AssertionError, match="block 10 counts its children"):
        index.check()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    index = NoIndex()
    cursor = fill(index, [1, 2, 3, 4], 10)
    assert cursor.blocks == 2
    assert index.match([1, 2, 3, 4], Namespace(), 4).blocks == []
    assert (len(index), index.num_unheld, 10 in index) == (0, 0, False)
    assert index.clear() == []
