"""Order, chunking and capacity, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.core.errors import ConfigError
from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams
from trimaran.schedule.capacity import MaxUtilization, make_capacity
from trimaran.schedule.chunking import FixedChunk
from trimaran.schedule.order import Fcfs, make_order


def sequences(count: int) -> list[Sequence]:
    return [
        Sequence(Request(str(i), [1, 2, 3], SamplingParams()), 0, [1, 2, 3]) for i in range(count)
    ]


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["push", "requeue", "take", "remove"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_fcfs_is_a_queue_that_the_preempted_enter_at_the_front(
    operations: list[tuple[str, int]],
) -> None:
    order, model = Fcfs(), list[Sequence]()
    for operation, at in operations:
        (new,) = sequences(1)
        if operation == "push":
            order.push(new)
            model.append(new)
        elif operation == "requeue":
            order.requeue(new)
            model.insert(0, new)
        elif operation == "take" and model:
            assert order.peek() is model[0]
            order.remove(model.pop(0))
        elif operation == "remove" and model:
            order.remove(model.pop(at % len(model)))
        assert list(order) == model
        assert len(order) == len(model)
        assert order.peek() is (model[0] if model else None)
    order.remove(sequences(1)[0])  # unknown: ignored
    assert list(order) == model


@given(
    wants=st.lists(st.integers(0, 30), max_size=12),
    size=st.integers(1, 20),
    budget=st.integers(1, 60),
)
def test_fixed_chunks_fill_the_budget_in_order(wants: list[int], size: int, budget: int) -> None:
    given_wants = np.array(wants, np.int32)
    counts = FixedChunk(size).share(np.zeros_like(given_wants), given_wants, budget).tolist()
    assert given_wants.tolist() == wants
    assert len(counts) == len(wants)
    assert sum(counts) == min(budget, sum(min(want, size) for want in wants))
    left = budget
    for want, count in zip(wants, counts, strict=True):
        assert count == min(want, size, left)
        left -= count


def test_max_utilization_reserves_what_is_known_and_takes_the_last() -> None:
    policy, running = MaxUtilization(), sequences(3)
    running[0].tokens.append(4)
    assert [policy.reserve(each) for each in running] == [4, 3, 3]
    assert policy.victim(running, running[0]) is running[2]


def test_policies_by_name() -> None:
    assert isinstance(make_order("fcfs"), Fcfs)
    assert isinstance(make_capacity("max-utilization", 4, 16), MaxUtilization)
    with pytest.raises(ConfigError, match="order is 'lifo'"):
        make_order("lifo")
    with pytest.raises(ConfigError, match="capacity is 'hope'"):
        make_capacity("hope", 4, 16)
