"""A long request among a permanent stream of short ones, under every combination."""

from __future__ import annotations

import itertools

import pytest
from support.scheduling import FakeEngine, make_engine

from trimaran.core.config import CAPACITIES, CHUNKINGS, ORDERS
from trimaran.core.request import Sequence, SequenceStatus
from trimaran.core.slo import BATCH, INTERACTIVE
from trimaran.schedule.longest_prefix import LongestPrefix
from trimaran.schedule.order import Priority, WeightedShortest

COMBINATIONS = [
    (order, chunking, capacity)
    for order, chunking, capacity in itertools.product(ORDERS, CHUNKINGS, CAPACITIES)
    if not (order == "longest-prefix" and chunking == "static")
]
STEM = list(range(36))  # of which all the short ones begin, so that it is always cached


def stream(engine: FakeEngine, number: int) -> list[Sequence]:
    """More than can be served: short, urgent, with a cached prefix."""
    return [
        engine.add([*STEM, number % 50], 2, priority=-2, slo=INTERACTIVE)
        for number in (2 * number, 2 * number + 1)
    ]


@pytest.mark.parametrize(("order", "chunking", "capacity"), COMBINATIONS)
def test_a_long_request_ends(order: str, chunking: str, capacity: str) -> None:
    engine = make_engine(
        num_blocks=60, max_num_seqs=4, max_num_batched_tokens=48, order=order,
        chunking=chunking, capacity=capacity,
    )  # fmt: skip
    pause = 0.3 if order == "priority" else 0.0  # so that levels of ten seconds are reached
    for number in range(12):
        stream(engine, number)
        engine.step()
    before = engine.scheduler.num_waiting
    long = engine.add([90 + place % 9 for place in range(100)], 40, priority=2, slo=BATCH)
    bound = overtakers_bound(engine, long, before)
    later: list[Sequence] = []
    overtakers: list[Sequence] = []
    steps = admitted_after = 0
    while not long.finished:
        engine.clock.advance(pause)
        later += stream(engine, steps)
        engine.step()
        steps += 1
        if long.status is SequenceStatus.WAITING and long.preemptions == 0:
            overtakers = [s for s in later if s.status is not SequenceStatus.WAITING]
            admitted_after = steps
        assert len(overtakers) <= bound(later), f"{len(overtakers)} were served before it"
        # Of four that run each is served in eight consecutive steps, and a chunk is at least
        # a token; a batch before its own may be as long as its shortest member.
        assert steps - admitted_after <= 8 * (100 + 40), "admitted, and never served"
        assert steps < 6000
    assert long.output_length == 40
    if order != "fcfs":
        assert overtakers, "the stream was to have every advantage"


def overtakers_bound(engine: FakeEngine, long: Sequence, before: int):  # type: ignore[no-untyped-def]
    """What the docstring of the order says of how many that came later go before."""
    order, arrival = engine.scheduler._order, long.request.arrival
    window = 0.0
    if isinstance(order, LongestPrefix):
        return lambda later: (before + 1) * order.BYPASSES
    if isinstance(order, Priority):
        window = order.SECONDS_A_LEVEL * (2 - -2)
    elif isinstance(order, WeightedShortest):
        window = order.STRETCH * order.service(long) / BATCH.weight
    return lambda later: sum(s.request.arrival <= arrival + window for s in later)


@pytest.mark.parametrize("budget", [8, 20])
def test_prompts_first_pass_over_those_that_run_every_second_step_at_most(budget: int) -> None:
    engine = make_engine(
        max_num_seqs=8, max_num_batched_tokens=budget, chunking="whole", prefix_cache=False
    )
    running = [engine.add([token], 60) for token in range(3)]
    engine.step()
    lengths = []
    for step in range(60):
        for _ in range(4):
            engine.add([step % 9] * (budget // 2), 1)  # ends with its prompt
        engine.step()
        lengths.append([sequence.output_length for sequence in running])
    gained = [now[0] - then[0] for then, now in itertools.pairwise(lengths)]
    assert 0 in gained, "nobody was ever passed over"
    assert all(one + other >= 1 for one, other in itertools.pairwise(gained))
