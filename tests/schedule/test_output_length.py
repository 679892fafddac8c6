"""What is expected of an output, from those that ended by themselves or were cut off."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.schedule.output_length import OutputLengths


def test_before_anything_was_seen() -> None:
    lengths = OutputLengths()
    assert lengths.expected(50) == 50
    assert lengths.expected(1000) == 128


@settings(max_examples=30, deadline=None)
@given(
    seen=st.lists(st.integers(1, 400), min_size=240, max_size=300),
    limit=st.integers(1, 500),
)
def test_without_cuts_it_is_the_mean_of_what_the_limit_leaves(seen: list[int], limit: int) -> None:
    lengths = OutputLengths()
    for length in seen:
        lengths.observe(length, ended=True)
    last = len(seen) - len(seen) % 16  # looked at again after every 16 of them
    window = [*seen[:last][-256:], *[128] * 4]
    expected = sum(min(length, limit) for length in window) / len(window)
    assert lengths.expected(limit) == pytest.approx(max(1.0, expected), rel=0.15)


def test_cut_off_outputs_say_that_they_were_longer() -> None:
    """Exponential lengths of mean 200, of which most are cut off at 100."""
    draw, lengths = random.Random(1), OutputLengths()
    for _ in range(256):
        length = 1 + int(draw.expovariate(1 / 200))
        limit = draw.choice([100, 100, 800])
        lengths.observe(min(length, limit), ended=length <= limit)
    # The integral of exp(-t / 200) up to 800 is 196; without regard to cuts it would be 110.
    assert 140 < lengths.expected(800) < 250


def test_all_are_cut_off() -> None:
    lengths = OutputLengths()
    for _ in range(256):
        lengths.observe(64, ended=False)
    assert lengths.expected(64) == pytest.approx(64)
    assert lengths.expected(32) == 32


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=80))
def test_it_grows_with_the_limit_and_never_beyond(seen: list[tuple[int, bool]]) -> None:
    lengths = OutputLengths()
    for length, ended in seen:
        lengths.observe(length, ended)
    found = [lengths.expected(limit) for limit in range(1, 200)]
    assert all(1 <= value <= limit + 1e-9 for limit, value in enumerate(found, 1))
    assert all(later >= one - 1e-9 for one, later in itertools.pairwise(found))
