"""Which block goes first: by priority, then by last use; and what the heaps cost."""

from __future__ import annotations

from trimaran.cache.eviction import EvictionOrder


def order(*blocks: int) -> EvictionOrder:
    """Unheld leaves, the first one used first."""
    made = EvictionOrder()
    for block in blocks:
        made.unheld(block, leaf=True)
    return made


def pops(made: EvictionOrder) -> list[int]:
    return [made.pop() for _ in range(len(made))]


def test_the_least_recently_used_goes_first() -> None:
    made = order(1, 2, 3)
    made.touch(1)
    made.held(2)
    made.unheld(2, leaf=True)
    assert pops(made) == [3, 1, 2]


def test_lower_priorities_go_first_and_age_counts_within_one() -> None:
    made = order(1, 2, 3, 4, 5)
    made.keep(1, 80, None)
    made.keep(2, 80, None)
    made.keep(5, 10, None)
    made.touch(1)
    assert pops(made) == [5, 3, 4, 2, 1]


def test_a_priority_ends_with_its_time() -> None:
    made = order(1, 2, 3)
    made.keep(1, 80, 5.0)
    made.keep(3, 10, 7.0)
    made.at(4.9)
    assert [made.priority(block) for block in (1, 2, 3)] == [80, 35, 10]
    made.at(5.0)
    assert [made.priority(block) for block in (1, 2, 3)] == [35, 35, 10]
    made.at(8.0)
    assert pops(made) == [1, 2, 3]


def test_the_last_wish_counts() -> None:
    made = order(1, 2)
    made.keep(1, 80, 5.0)
    made.keep(1, 90, 20.0)
    made.at(10.0)
    assert made.priority(1) == 90
    made.keep(1, 35, 30.0)
    assert made.priority(1) == 35
    assert pops(made) == [1, 2]


def test_a_priority_is_gone_with_its_block() -> None:
    made = order(1)
    made.keep(1, 80, 5.0)
    assert made.pop() == 1
    made.unheld(1, leaf=True)
    assert made.priority(1) == 35
    made.at(6.0)
    assert pops(made) == [1]


def test_what_is_spent_goes_before_the_lowest_priority() -> None:
    made = order(1, 2)
    made.keep(1, 0, None)
    made.spend(2)
    assert pops(made) == [2, 1]


def test_only_leaves_go_and_keep_their_age_until_they_are_ones() -> None:
    made = EvictionOrder()
    made.unheld(1, leaf=False)
    made.unheld(2, leaf=True)
    made.unheld(3, leaf=True)
    assert made.pop() == 2
    made.leaf(1)
    assert pops(made) == [1, 3]


def test_the_heaps_stay_as_small_as_what_they_are_about() -> None:
    made = order(*range(10))
    for number in range(10_000):
        made.touch(number % 10)
        made.keep(number % 10, 80, 1e6 + number)
    assert len(made._heap) <= 2 * 10 + 65
    assert len(made._ends) <= 2 * 10 + 65
    made.check(set(range(10)), set(range(10)))
    assert pops(made) == list(range(10))


def test_clear_returns_what_is_unheld() -> None:
    made = order(1, 2)
    made.keep(1, 80, 5.0)
    made.held(2)
    assert made.clear() == [1]
    assert (len(made), made.priority(1)) == (0, 35)
    made.check(set(), set())
