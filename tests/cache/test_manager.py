"""Tables, sharing and copy-on-write, one rule at a time.

That the rules hold together is shown by the state machine of the scheduler.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from trimaran.cache.indices import make_index
from trimaran.cache.manager import KVCacheManager
from trimaran.cache.radix_index import RadixIndex
from trimaran.core.request import Request, Sequence
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams


def sequence(
    tokens: list[int], name: str = "a", salt: str = "", retention: Retention | None = None
) -> Sequence:
    request = Request(name, list(tokens), SamplingParams(), cache_salt=salt, retention=retention)
    return Sequence(request, 0, list(tokens))


def admit(kv: KVCacheManager, new: Sequence, computed: int | None = None) -> Sequence:
    """Admits and computes `computed` tokens (all by default)."""
    match = kv.match(new)
    assert kv.admit(new, match, new.total)
    new.computed = new.total if computed is None else computed
    kv.commit(new, new.computed)
    return new


@pytest.mark.parametrize(
    ("length", "again", "hit"), [(8, 8, 4), (9, 9, 8), (8, 12, 8), (3, 9, 0), (12, 5, 4)]
)
def test_a_hit_is_in_full_blocks_and_leaves_a_token(length: int, again: int, hit: int) -> None:
    kv = KVCacheManager(8, 4)
    kv.release(admit(kv, sequence(list(range(length)))))
    kv.check()
    assert kv.match(sequence(list(range(again)))).tokens == hit


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    kv = KVCacheManager(8, 4, prefix_cache=False)
    kv.release(admit(kv, sequence(list(range(8)))))
    assert kv.match(sequence(list(range(8)))).tokens == 0
    assert kv.usage().free == 8
    kv.check()


def test_only_computed_blocks_are_found() -> None:
    kv = KVCacheManager(8, 4)
    admit(kv, sequence(list(range(12))), computed=7)
    assert kv.match(sequence(list(range(12)))).tokens == 4


def test_admission_is_all_or_nothing() -> None:
    kv = KVCacheManager(4, 4)
    kv.release(admit(kv, sequence(list(range(8)))))
    long = sequence(list(range(20)))  # five blocks, two of them found
    before = kv.usage()
    assert not kv.admit(long, kv.match(long), long.total)
    assert kv.usage() == before
    assert kv.block_table(long) == []
    fits = sequence(list(range(16)))
    match = kv.match(fits)
    assert kv.admit(fits, match, fits.total)
    assert kv.block_table(fits)[:2] == match.blocks
    assert kv.usage().held == 4
    kv.check()


def test_found_blocks_that_rest_are_not_counted_as_room() -> None:
    kv = KVCacheManager(3, 4)
    kv.release(admit(kv, sequence(list(range(8)))))
    other = admit(kv, sequence([9], "b"))
    again = sequence(list(range(12)), "c")  # finds two, needs a third; none is left
    assert not kv.admit(again, kv.match(again), again.total)
    kv.release(other)
    assert kv.admit(again, kv.match(again), again.total)


def test_allocation_is_all_or_nothing() -> None:
    kv = KVCacheManager(3, 4)
    one = admit(kv, sequence(list(range(4))))
    assert not kv.allocate(one, 16)
    assert len(kv.block_table(one)) == 1
    assert kv.allocate(one, 12)
    assert len(kv.block_table(one)) == 3
    kv.check()


def test_equal_blocks_computed_at_the_same_time_become_one() -> None:
    kv = KVCacheManager(8, 4)
    one, two = sequence(list(range(8)), "a"), sequence(list(range(8)), "b")
    for each in (one, two):
        assert kv.admit(each, kv.match(each), 8)
    assert kv.usage().held == 4
    for each in (one, two):
        each.computed = 8
        kv.commit(each, 8)
        kv.check()
    assert kv.block_table(one) == kv.block_table(two)
    assert kv.usage().held == 2
    kv.release(one)
    two.tokens += [1, 2, 3, 4]
    assert kv.allocate(two, 12)
    two.computed = 12
    kv.commit(two, 12)
    kv.release(two)
    assert kv.usage().cached == 3
    kv.check()


def fork(kv: KVCacheManager, parent: Sequence, index: int = 1) -> Sequence:
    child = Sequence(parent.request, index, list(parent.tokens), forked=True)
    kv.fork(parent, child)
    child.computed = parent.computed
    return child


def rows_of(kv: KVCacheManager, sequences: list[Sequence]) -> npt.NDArray[np.intp]:
    return np.array([kv.row(each) for each in sequences], np.intp)


def test_the_first_to_write_a_shared_block_copies_it_and_the_last_need_not() -> None:
    kv = KVCacheManager(8, 4)
    parent = admit(kv, sequence(list(range(6))))
    children = [fork(kv, parent, index) for index in (1, 2)]
    shared = kv.block_table(parent)
    assert kv.block_table(children[0]) == kv.block_table(children[1]) == shared
    assert kv.usage().held == 2
    kv.check()
    everyone = [parent, *children]
    rows = rows_of(kv, everyone)
    assert kv.short(rows, np.array([7, 7, 7], np.int32)).tolist() == [0, 1, 2]
    for each in everyone:
        assert kv.allocate(each, 7)
        kv.check()
    tables = [kv.block_table(each) for each in everyone]
    assert [table[0] for table in tables] == [shared[0]] * 3
    assert len({table[1] for table in tables}) == 3
    assert tables[2] == shared
    assert kv.take_copies() == [(shared[1], tables[0][1]), (shared[1], tables[1][1])]
    assert kv.take_copies() == []
    assert kv.short(rows, np.array([8, 8, 8], np.int32)).tolist() == []


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    kv = KVCacheManager(8, 4)
    parent = admit(kv, sequence(list(range(8))))
    child = fork(kv, parent)
    for each in (parent, child):
        assert kv.allocate(each, 9)
    assert kv.take_copies() == []
    assert kv.block_table(parent)[:2] == kv.block_table(child)[:2]
    assert kv.block_table(parent)[2] != kv.block_table(child)[2]


def test_a_fork_shares_only_computed_blocks() -> None:
    kv = KVCacheManager(8, 4)
    parent = sequence(list(range(6)))
    assert kv.admit(parent, kv.match(parent), 16)
    parent.computed = 6
    kv.commit(parent, 6)
    child = fork(kv, parent)
    assert kv.block_table(child) == kv.block_table(parent)[:2]
    kv.check()


def test_forks_index_their_own_continuations() -> None:
    kv = KVCacheManager(16, 2)
    parent = admit(kv, sequence([1, 2, 3]))
    child = fork(kv, parent)
    for each, tail in ((parent, [4, 5, 6]), (child, [7, 8, 9])):
        each.tokens += tail
        assert kv.allocate(each, 6)
        each.computed = 6
        kv.commit(each, 6)
    kv.check()
    assert kv.match(sequence([1, 2, 3, 4, 5, 6, 0])).blocks == kv.block_table(parent)
    assert kv.match(sequence([1, 2, 3, 7, 8, 9, 0])).blocks == kv.block_table(child)


def test_a_copy_is_dropped_with_the_sequence_it_was_for() -> None:
    kv = KVCacheManager(8, 4)
    parent = admit(kv, sequence(list(range(6))))
    child = fork(kv, parent)
    assert kv.allocate(child, 7)
    kv.release(child)
    assert kv.take_copies() == []
    kv.check()


def test_copy_on_write_without_room_changes_nothing() -> None:
    kv = KVCacheManager(2, 4)
    parent = admit(kv, sequence(list(range(6))))
    child = fork(kv, parent)
    assert not kv.allocate(child, 7)
    assert kv.block_table(child) == kv.block_table(parent)
    kv.release(parent)
    assert kv.allocate(child, 7)  # nobody else holds it now
    assert kv.take_copies() == []
    kv.check()


def test_a_prefix_outlives_what_continues_it() -> None:
    kv = KVCacheManager(4, 4)
    kv.release(admit(kv, sequence(list(range(16)))))
    admit(kv, sequence([99] * 8, "b"))  # evicts two blocks
    assert kv.match(sequence(list(range(16)))).tokens == 8
    kv.check()


def test_salts_keep_tenants_apart() -> None:
    kv = KVCacheManager(8, 4)
    kv.release(admit(kv, sequence(list(range(8)), salt="a")))
    assert kv.match(sequence(list(range(8)), salt="b")).tokens == 0
    assert kv.match(sequence(list(range(8)), salt="a")).tokens == 4


# ---------------------------------------------------------------------- to the token


def radix(num_blocks: int, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, index=RadixIndex(block_size))


@pytest.mark.parametrize(
    ("length", "again", "hit"), [(8, 8, 7), (9, 9, 8), (6, 12, 6), (3, 9, 3), (12, 5, 4), (1, 1, 0)]
)
def test_with_the_trie_a_hit_leaves_just_a_token(length: int, again: int, hit: int) -> None:
    kv = radix(8)
    kv.release(admit(kv, sequence(list(range(length)))))
    match = kv.match(sequence(list(range(again))))
    assert (match.tokens, len(match.blocks), match.partial) == (hit, hit // 4, hit % 4)
    kv.check()


def test_the_partial_block_is_copied_into_one_of_its_own() -> None:
    kv = radix(8)
    kv.release(admit(kv, sequence(list(range(6)))))
    one = sequence([0, 1, 2, 3, 4, 5, 9], "b")
    match = kv.match(one)
    assert kv.admit(one, match, 7)
    table = kv.block_table(one)
    assert table[0] == match.blocks[0]
    assert kv.take_copies() == [(match.source, table[1])]
    assert kv.usage().cached == 1  # the source, held by nobody
    kv.check()


def test_a_source_is_read_before_it_becomes_the_target_of_another() -> None:
    kv = radix(3)
    for token in (1, 2):
        kv.release(admit(kv, sequence([token, 0, 0])))
    one, two = sequence([1, 0, 0, 8], "b"), sequence([2, 0, 0, 8], "c")
    first = kv.match(one)
    assert kv.admit(one, first, 4)  # takes the free block
    second = kv.match(two)
    assert kv.admit(two, second, 4)  # takes the first's source
    (last,) = kv.block_table(one)
    assert kv.block_table(two) == [first.source]
    assert kv.take_copies() == [(first.source, last), (second.source, first.source)]
    kv.check()


def test_a_source_that_is_evicted_for_its_own_copy_is_not_copied() -> None:
    kv = radix(1)
    kv.release(admit(kv, sequence([1, 2, 3])))
    again = sequence([1, 2, 9], "b")
    match = kv.match(again)
    assert match.tokens == 2
    assert kv.admit(again, match, 3)
    assert kv.take_copies() == []
    assert kv.block_table(again) == [match.source]
    kv.check()


def test_only_what_a_step_has_computed_is_stored_at_the_end() -> None:
    kv = radix(8)
    kv.release(admit(kv, sequence(list(range(6)))))
    again = sequence([*range(6), 7, 7], "b")
    assert kv.admit(again, kv.match(again), 8)
    again.computed = 6  # the copy isn't made yet
    kv.take_copies()
    kv.release(again)
    assert len(kv.index) == 2
    failed = sequence([*range(6), 7, 7], "c")
    assert kv.admit(failed, kv.match(failed), 8)
    failed.computed = 7
    kv.release(failed, sound=False)
    assert kv.match(sequence([*range(6), 7, 7, 7])).tokens == 6
    done = sequence([*range(6), 7, 7], "d")
    assert kv.admit(done, kv.match(done), 8)
    done.computed = 7
    kv.release(done)
    assert kv.match(sequence([*range(6), 7, 7, 7])).tokens == 7
    kv.check()


def test_a_tail_that_a_fork_goes_on_from_is_left_to_it() -> None:
    kv = radix(8)
    parent = admit(kv, sequence(list(range(6))))
    child = fork(kv, parent)
    kv.release(parent)
    assert len(kv.index) == 1
    assert kv.allocate(child, 7)
    assert kv.take_copies() == []  # the last holder writes on
    child.tokens += [6]
    child.computed = 7
    kv.release(child)
    assert kv.match(sequence(list(range(9)))).tokens == 7
    kv.check()


# ---------------------------------------------------------------------- retention


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_kept_prompt_outlives_what_came_later(index: str) -> None:
    kv = KVCacheManager(4, 4, index=make_index(index, 4))
    kept = sequence([1] * 4, "a", retention=Retention(80, seconds=10.0))
    kv.at(100.0)
    kv.release(admit(kv, kept))
    later = [sequence([token] * 4, str(token)) for token in (2, 3, 4, 5)]
    for each in later:
        kv.release(admit(kv, each))
    assert kv.match(sequence([1] * 5)).tokens == 4
    assert kv.match(sequence([2] * 5)).tokens == 0
    kv.at(110.0)  # it is the oldest, and like any other now
    kv.release(admit(kv, sequence([6] * 4, "6")))
    assert kv.match(sequence([1] * 5)).tokens == 0
    kv.check()


def test_low_priority_goes_first_and_output_is_as_any() -> None:
    kv = KVCacheManager(4, 4)
    kv.release(admit(kv, sequence([1] * 4)))
    cheap = sequence([2] * 4, "b", retention=Retention(0))
    admit(kv, cheap)
    cheap.tokens += [3] * 4  # its output
    assert kv.allocate(cheap, 8)
    cheap.computed = 8
    kv.commit(cheap, 8)
    kv.release(cheap)
    admit(kv, sequence([4] * 8, "c"))  # one is free, one must go
    assert kv.match(sequence([1] * 5)).tokens == 0  # the prompt waits for the output after it
    assert kv.match(sequence([2] * 4 + [3] * 5)).tokens == 8


# ---------------------------------------------------------------------- the matrix


def test_rows_follow_the_tables() -> None:
    kv = KVCacheManager(8, 4)
    one, two = sequence([1, 2], "a"), sequence([3, 4], "b")
    for each in (one, two):
        admit(kv, each)
    before = rows_of(kv, [one, two]).tolist()
    for each in (one, two):
        kv.release(each)
    for each in (one, two):  # rows are used again, in another order
        admit(kv, each)
    assert rows_of(kv, [one, two]).tolist() == before[::-1]
    expected = [kv.block_table(one), kv.block_table(two)]
    assert kv.tables(rows_of(kv, [one, two]), 1).tolist() == expected


def test_tables_are_padded_copies() -> None:
    kv = KVCacheManager(8, 4)
    one, two = admit(kv, sequence(list(range(8)), "a")), admit(kv, sequence([9], "b"))
    tables = kv.tables(rows_of(kv, [one, two]), 2)
    assert tables.dtype == np.int32
    assert tables.flags.c_contiguous
    assert tables.tolist() == [kv.block_table(one), [*kv.block_table(two), -1]]
    kv.release(one)
    assert tables[0, 0] >= 0
    with pytest.raises(AssertionError, match="none is so long"):
        kv.tables(rows_of(kv, [two]), 1000)


def test_reset_forgets_prefixes_of_the_past_and_of_those_that_run() -> None:
    kv = KVCacheManager(8, 2)
    kv.release(admit(kv, sequence([1, 2, 3, 4], "a")))
    alive = admit(kv, sequence([5, 6, 7], "b"))
    kv.reset_prefix_cache()
    kv.check()
    assert (kv.usage().cached, kv.usage().held) == (0, 2)
    alive.tokens += [8, 9]
    assert kv.allocate(alive, 5)
    alive.computed = 5
    kv.commit(alive, 5)
    kv.check()
    kv.release(alive)
    assert kv.usage().free == 8


def test_usage_counts_hits() -> None:
    kv = KVCacheManager(8, 4)
    kv.release(admit(kv, sequence(list(range(10)))))
    admit(kv, sequence(list(range(10))))
    usage = kv.usage()
    assert (usage.queried_tokens, usage.hit_tokens) == (20, 8)
    assert usage.free + usage.held + usage.cached == usage.total == 8


def test_releasing_what_has_no_table_does_nothing() -> None:
    kv = KVCacheManager(2, 4)
    kv.release(sequence([1]))
    assert kv.usage().free == 2


def test_check_finds_a_table_that_went_its_own_way() -> None:
    kv = KVCacheManager(4, 4)
    one = admit(kv, sequence([1, 2]))
    kv.check()
    stray = (kv.block_table(one)[0] + 1) % 4
    kv._tables[one].blocks.append(stray)
    with pytest.raises(AssertionError, match=f"block {stray} counts 0 references, 1 tables"):
        kv.check()
    kv._tables[one].blocks.pop()
    kv._matrix.blocks[kv._tables[one].row, 0] = stray
    with pytest.raises(AssertionError, match="the row of a differs"):
        kv.check()


def test_a_second_table_is_refused() -> None:
    kv = KVCacheManager(4, 4)
    one = admit(kv, sequence([1, 2]))
    with pytest.raises(AssertionError, match="has a table already"):
        kv.admit(one, kv.match(one), 2)


def test_live_tokens_count_shared_blocks_once_and_cached_ones_not() -> None:
    kv = KVCacheManager(16, 4)
    kv.release(admit(kv, sequence([9] * 8)))  # two blocks stay, cached
    parent = admit(kv, sequence(list(range(6))))
    children = [fork(kv, parent, index) for index in (1, 2)]

    def live(*sequences: Sequence) -> int:
        rows = rows_of(kv, list(sequences))
        return kv.live_tokens(rows, np.array([each.computed for each in sequences], np.int32))

    assert live(parent, *children) == 6 and kv.usage().held == 2
    assert kv.allocate(children[0], 7)  # a block of its own in place of the partly filled one
    children[0].computed = 7
    assert live(parent, *children) == 4 + 2 + 3 and kv.usage().held == 3
    for child in children:
        kv.release(child)
    assert live(parent) == 6
    reserved = kv.reserve(kv.no_match(parent), 3)  # to be filled by a lower tier: not live yet
    assert reserved is not None
    assert live(parent) == 6 and kv.usage().held == 5
