"""The pool against a model: every block is in one state, counts are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cache.block_pool import BlockPool
from trimaran.cache.hash_index import HashIndex
from trimaran.cache.prefix_index import Cursor, NoIndex
from trimaran.core.namespace import Namespace


def allocate(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "retain", "release", "store"]), st.integers(0, 30)),
    max_size=60,
)


@given(size=st.integers(1, 8), operations=OPERATIONS)
def test_every_block_is_free_held_or_cached(size: int, operations: list[tuple[str, int]]) -> None:
    index = HashIndex(block_size=1)
    pool = BlockPool(size, index)
    held: list[list[int]] = []  # tables of one block each
    for number, (operation, at) in enumerate(operations):
        if operation == "allocate":
            count, before = at % (size + 2), pool.available
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > before)
            for block in blocks or []:
                assert [block] not in held, "a held block was given away"
                held.append([block])
        elif operation == "retain" and held:
            held.append(list(held[at % len(held)]))
            pool.retain(held[-1][0])
        elif operation == "release" and held:
            pool.release(held.pop(at % len(held))[0])
        elif operation == "store" and held:
            block = held[at % len(held)][0]
            if block not in index:
                assert index.insert(Cursor(Namespace()), [number], block) == block
        pool.check(held)
        assert pool.num_free + pool.num_held + pool.num_cached == size
        assert pool.num_held == len({block for (block,) in held})


def test_free_blocks_go_before_cached_ones_and_these_by_age() -> None:
    index = HashIndex(block_size=1)
    pool = BlockPool(3, index)
    first, second, third = allocate(pool, 3)
    index.insert(Cursor(Namespace()), [1], first)
    index.insert(Cursor(Namespace()), [2], second)
    for block in (second, third, first):
        pool.release(block)
    assert (pool.num_free, pool.num_cached) == (1, 2)
    assert allocate(pool, 3) == [third, second, first]
    assert len(index) == 0


def test_a_cached_block_that_is_used_again_becomes_the_youngest() -> None:
    index = HashIndex(block_size=1)
    pool = BlockPool(2, index)
    first, second = allocate(pool, 2)
    index.insert(Cursor(Namespace()), [1], first)
    index.insert(Cursor(Namespace()), [2], second)
    pool.release(first)
    pool.release(second)
    pool.retain(first)
    pool.release(first)
    assert allocate(pool, 1) == [second]


def test_clearing_the_index_frees_cached_blocks_and_leaves_held_ones() -> None:
    index = HashIndex(block_size=1)
    pool = BlockPool(3, index)
    cached, held, _ = allocate(pool, 3)
    index.insert(Cursor(Namespace()), [1], cached)
    index.insert(Cursor(Namespace()), [2], held)
    pool.release(cached)
    pool.clear_index()
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 2, 0)
    pool.release(held)
    assert pool.num_free == 2


def test_misuse_is_found() -> None:
    pool = BlockPool(2, NoIndex())
    (block,) = allocate(pool, 1)
    with pytest.raises(AssertionError, match="1 references, 0 tables"):
        pool.check([])
    with pytest.raises(AssertionError, match="1 references, 2 tables"):
        pool.check([[block], [block]])
    pool.release(block)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(block)
