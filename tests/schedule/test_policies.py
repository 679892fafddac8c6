"""Order, chunking and capacity, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.core.config import CAPACITIES, CHUNKINGS, ORDERS
from trimaran.core.errors import ConfigError
from trimaran.core.request import Request, Sequence, SequenceStatus
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import BATCH, INTERACTIVE, STANDARD, SloClass
from trimaran.schedule.capacity import MaxUtilization, NoEvict, make_capacity
from trimaran.schedule.chunking import (
    FineChunk,
    FixedChunk,
    StaticBatch,
    WholePrompt,
    make_chunking,
)
from trimaran.schedule.cost_model import StepCostModel, StepLoad
from trimaran.schedule.longest_prefix import LongestPrefix
from trimaran.schedule.order import Fcfs, Order, Priority, WeightedShortest, make_order
from trimaran.schedule.output_length import OutputLengths


def sequences(count: int) -> list[Sequence]:
    return [
        Sequence(Request(str(i), [1, 2, 3], SamplingParams()), 0, [1, 2, 3]) for i in range(count)
    ]


def sequence(
    name: str, prompt: int | list[int] = 4, *, arrival: float = 0.0, priority: int = 0,
    output: int | None = 16, slo: SloClass = STANDARD, n: int = 1, salt: str = "",
) -> Sequence:  # fmt: skip
    tokens = [7] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=output, n=n)
    request = Request(name, tokens, params, arrival, priority, cache_salt=salt, slo=slo)
    return Sequence(request, 0, list(tokens))


def drawn(order: Order) -> list[str]:
    """All of them in the order in which they are admitted, as if each had ended at once."""
    names = []
    order.begin()
    while (first := order.peek()) is not None:
        names.append(first.id)
        order.remove(first)
        first.status = SequenceStatus.FINISHED
        order.begin()
    assert len(order) == 0
    return names


def orders(hits: dict[str, int] | None = None) -> dict[str, Order]:
    def hit(each: Sequence) -> int:
        return (hits or {}).get(each.id, 0)

    parts = (hit, StepCostModel(), OutputLengths(), 4096)
    return {name: make_order(name, *parts) for name in ORDERS}


# ---------------------------------------------------------------------- order

QUEUES = st.lists(
    st.tuples(st.sampled_from(["push", "requeue", "take", "remove"]), st.integers(0, 9)),
    max_size=40,
)


@given(operations=QUEUES)
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


@pytest.mark.parametrize("name", ORDERS)
@given(operations=QUEUES)
def test_every_order_holds_who_came_and_did_not_leave(
    name: str, operations: list[tuple[str, int]]
) -> None:
    hits = {f"s{i}": 7 * i % 5 for i in range(40)}
    order = orders(hits)[name]
    waiting: set[Sequence] = set()
    preempted: list[Sequence] = []
    for number, (operation, at) in enumerate(operations):
        new = sequence(f"s{number}", 1 + 9 * at, arrival=number / 3, priority=at - 4)
        if operation == "push":
            order.push(new)
            waiting.add(new)
        elif operation == "requeue":
            order.requeue(new)
            preempted.insert(0, new)
        elif operation == "take":
            order.begin()
            first = order.peek()
            assert (first is None) == (not waiting and not preempted)
            assert first is None or first is order.peek()
            assert not preempted or first is preempted[0]
            if first is not None:
                order.remove(first)
                preempted = [each for each in preempted if each is not first]
                waiting.discard(first)
        elif waiting:
            gone = sorted(waiting, key=lambda each: each.id)[at % len(waiting)]
            gone.status = SequenceStatus.FINISHED
            order.remove(gone)
            order.remove(gone)
            waiting.discard(gone)
        assert len(order) == len(waiting) + len(preempted)
        assert set(order) == waiting | set(preempted)
        assert list(order)[: len(preempted)] == preempted
    drawn(order)


def test_priority_first_until_waiting_makes_up_for_it() -> None:
    order = Priority()
    for name, priority, arrival in (
        ("low", 3, 0.0), ("same", 1, 2.0), ("later", 1, 3.0), ("high", 0, 5.0),
        ("high and late", 0, 31.0),
    ):  # fmt: skip
        order.push(sequence(name, priority=priority, arrival=arrival))
    assert drawn(order) == ["high", "same", "later", "low", "high and late"]


def test_the_shortest_for_its_weight_first_until_waiting_makes_up_for_it() -> None:
    order = orders()["weighted-shortest"]
    assert isinstance(order, WeightedShortest)
    order.push(sequence("long prompt", 3000, output=4))
    order.push(sequence("long output", 4, output=100))
    order.push(sequence("short", 4, output=4))
    order.push(sequence("short in bulk", 4, output=4, slo=BATCH))
    order.push(sequence("urgent", 40, output=8, slo=INTERACTIVE))
    order.push(sequence("four of them", 4, output=4, n=4))
    service = {each.id: order.service(each) for each in order}
    rank = {each.id: service[each.id] / each.request.slo.weight for each in order}
    assert service["four of them"] > 3 * service["short"]
    expected = sorted(rank, key=lambda name: rank[name])
    assert expected[0] in ("urgent", "short") and expected.index("short in bulk") > 1
    longest = max(rank.values())
    order.push(sequence("too late", 4, output=4, arrival=8 * longest + 0.1))
    assert drawn(order) == [*expected, "too late"]


def test_what_is_cached_is_no_service() -> None:
    order = orders({"cached": 2900})["weighted-shortest"]
    order.push(sequence("fresh", 1000))
    order.push(sequence("cached", 3000))
    assert drawn(order) == ["cached", "fresh"]


def test_the_longest_prefix_first_then_by_arrival() -> None:
    order = orders({"b": 8, "d": 32, "e": 8})["longest-prefix"]
    for name in "abcde":
        order.push(sequence(name, 40))
    assert drawn(order) == ["d", "b", "e", "a", "c"]


def test_who_shares_a_prefix_waits_until_it_is_computed() -> None:
    hits: dict[str, int] = {}
    order = LongestPrefix(lambda each: hits.get(each.id, 0))
    stem = list(range(100, 150))
    leader, follower = sequence("leader", [*stem, 1]), sequence("follower", [*stem, 2])
    foreign = sequence("foreign", [*stem, 3], salt="tenant")
    short, other = sequence("short", [9] * 20), sequence("other", [8] * 50)
    for each in (leader, follower, foreign, short, other):
        order.push(each)

    def admit() -> list[str]:
        order.begin()
        names = []
        while (first := order.peek()) is not None:
            order.remove(first)
            first.status = SequenceStatus.RUNNING
            names.append(first.id)
        return names

    assert admit() == ["leader", "foreign", "short", "other"]  # which share nothing
    leader.computed = 31
    assert admit() == []
    assert list(order) == [follower]
    leader.computed = 32
    hits["follower"] = 32
    assert admit() == ["follower"]


@pytest.mark.parametrize("how", ["preempted", "ended"])
def test_who_waited_for_one_that_left_goes_itself(how: str) -> None:
    order = LongestPrefix(lambda each: 0)
    leader, follower = sequence("leader", [5] * 40), sequence("follower", [5] * 40)
    order.push(leader)
    order.push(follower)
    order.begin()
    assert order.peek() is leader
    order.remove(leader)
    leader.status = SequenceStatus.RUNNING
    order.begin()
    assert order.peek() is None
    leader.status = SequenceStatus.WAITING if how == "preempted" else SequenceStatus.FINISHED
    order.begin()
    assert order.peek() is follower


def test_a_long_queue_is_looked_up_bit_by_bit() -> None:
    looked: list[str] = []

    def hit(each: Sequence) -> int:
        looked.append(each.id)
        return 0

    order = LongestPrefix(hit)
    for number in range(1000):
        order.push(sequence(str(number), 40))
    for step in range(1, 5):
        order.begin()
        assert len(looked) == step * order.LOOKUPS
    assert looked == [str(number) for number in range(order.WINDOW)]
    order.begin()
    assert looked[order.WINDOW :] == [str(number) for number in range(order.LOOKUPS)]


# ---------------------------------------------------------------------- chunking


def share(policy: object, wants: list[int], budget: int) -> list[int]:
    given_wants = np.array(wants, np.int32)
    starts = np.arange(len(wants), dtype=np.int32)
    policy.begin(starts, given_wants, np.full(len(wants), np.inf))  # type: ignore[attr-defined]
    counts = policy.share(starts, given_wants, budget)  # type: ignore[attr-defined]
    assert given_wants.tolist() == wants
    assert counts.dtype == np.int32 and len(counts) == len(wants)
    return counts.tolist()  # type: ignore[no-any-return]


WANTS = st.lists(st.one_of(st.integers(0, 2), st.integers(0, 30)), max_size=12)


@given(wants=WANTS, size=st.integers(1, 20), budget=st.integers(1, 60))
def test_fixed_chunks_fill_the_budget_in_order(wants: list[int], size: int, budget: int) -> None:
    counts = share(FixedChunk(size), wants, budget)
    assert sum(counts) == min(budget, sum(min(want, size) for want in wants))
    left = budget
    for want, count in zip(wants, counts, strict=True):
        assert count == min(want, size, left)
        left -= count


@pytest.mark.parametrize("name", CHUNKINGS)
@given(wants=WANTS, budget=st.integers(1, 60))
def test_every_chunking_keeps_the_budget_and_serves_the_first(
    name: str, wants: list[int], budget: int
) -> None:
    policy = make_chunking(name, None, budget, 8, StepCostModel())
    counts = share(policy, wants, budget)
    assert all(0 <= count <= want for count, want in zip(counts, wants, strict=True))
    whole = name in ("whole", "static")
    assert sum(counts) <= budget or (whole and sum(count > 0 for count in counts) == 1)
    first = next((place for place, want in enumerate(wants) if want), None)
    assert first is None or counts[first] > 0
    if whole:
        assert all(count in (0, want) for count, want in zip(counts, wants, strict=True))


def test_a_whole_prompt_is_alone_where_it_is_too_long() -> None:
    policy = WholePrompt()
    assert policy.prompts_first
    assert [policy.admit(0, want, 10, alone=False) for want in (10, 11)] == [10, 0]
    assert policy.admit(0, 11, 10, alone=True) == 11


def test_a_batch_is_closed_until_all_of_it_has_ended() -> None:
    policy = StaticBatch(seats=4)
    assert policy.opens(running=0, joined=0)
    assert policy.opens(running=2, joined=2)
    assert not policy.opens(running=4, joined=2)  # seats are taken
    assert not policy.opens(running=1, joined=0)  # and stay empty
    assert policy.opens(running=0, joined=0)
    assert policy.opens(running=1, joined=1)
    assert not policy.opens(running=1, joined=0)  # nobody came
    assert not policy.opens(running=1, joined=0)


def fitted() -> StepCostModel:
    """5 ms a step, 0.5 ms a decode, 0.1 ms a token of a prompt, 1 us a hundred pairs."""
    model = StepCostModel()
    for number in range(200):
        load = StepLoad(number % 9, 0, number % 9 * 500)
        if number % 3 == 0:
            load = load.with_chunk(37 * number % 900, 1 + 53 * number % 700)
        model.observe(load, seconds_of(load))
    return model


def seconds_of(load: StepLoad) -> float:
    linear = 5e-3 + 5e-4 * load.decode_rows + 1e-4 * load.prefill_tokens
    return linear + 1e-7 * load.decode_context + 1e-8 * load.prefill_pairs


def fine(targets: list[float], wants: list[int], starts: list[int], budget: int) -> list[int]:
    policy = FineChunk(fitted())
    arrays = np.array(starts, np.int32), np.array(wants, np.int32)
    policy.begin(*arrays, np.array(targets))
    return policy.share(*arrays, budget).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", [0.02, 0.03, 0.05])
def test_a_fine_chunk_is_the_largest_that_keeps_the_strictest_target(target: float) -> None:
    targets, starts = [0.2, target, np.inf, 1e-3], [300, 300, 300, 200]
    counts = fine(targets, [1, 1, 1, 5000], starts, 4096)
    assert counts[:3] == [1, 1, 1]
    load = StepLoad(3, 0, 903)
    taken = seconds_of(load.with_chunk(200, counts[3]))
    assert target * 0.95 < taken < target * 1.03
    # The prompt's own target counts once it decodes, and a target nobody can keep, little.
    assert fine([0.001, 0.1], [1, 3000], [100, 0], 4096) == [1, FineChunk.FLOOR]


def test_without_targets_fine_chunks_have_the_budget() -> None:
    assert fine([np.inf, 0.01], [1, 3000], [10, 0], 512) == [1, 511]
    assert fine([0.01, 0.01], [3000, 3000], [0, 0], 512) == [512, 0]


def test_a_waiting_prompt_gets_what_is_left_of_the_target() -> None:
    policy = FineChunk(fitted())
    starts, wants = np.array([300, 0], np.int32), np.array([1, 40], np.int32)
    policy.begin(starts, wants, np.array([0.02, np.inf]))
    assert policy.share(starts, wants, 4096).tolist() == [1, 40]
    count = policy.admit(0, 4000, 4055, alone=False)
    load = StepLoad(1, 0, 301).with_chunk(0, 40).with_chunk(0, count)
    assert 0.019 < seconds_of(load) < 0.0206
    assert policy.admit(0, 4000, 4000, alone=False) <= 4  # nothing is left


# ---------------------------------------------------------------------- capacity


def test_max_utilization_reserves_what_is_known_and_takes_the_last() -> None:
    policy, running = MaxUtilization(), sequences(3)
    running[0].tokens.append(4)
    assert [policy.reserve(each) for each in running] == [4, 3, 3]
    assert policy.victim(running, running[0]) is running[2]


def test_no_evict_promises_the_longest_output_once() -> None:
    policy = NoEvict(num_blocks=20, block_size=4, max_model_len=64)
    one = sequence("one", 10, output=15)  # 24 positions are computed
    assert policy.reserve(one) == 24
    assert policy.reserve(sequence("endless", 10, output=None)) == 64
    assert policy.reserve(sequence("cut", 60, output=100)) == 64
    several = sequence("several", 10, output=15, n=3)  # two full blocks are shared
    assert policy.reserve(several) == 4 * (2 + 3 * 4)
    policy.started(one)
    assert policy.promised == 6 and policy.admits(several)
    policy.started(several)
    assert policy.promised == 20 and not policy.admits(sequence("more", 1, output=1))
    policy.stopped(several, 1)  # one has ended, one is never forked
    assert policy.promised == 12
    policy.stopped(several, 0)
    assert policy.promised == 6
    policy.stopped(one, 0)
    assert policy.promised == 0


def test_policies_by_name() -> None:
    kinds = {name: type(order) for name, order in orders().items()}
    assert kinds == {
        "fcfs": Fcfs, "priority": Priority, "longest-prefix": LongestPrefix,
        "weighted-shortest": WeightedShortest,
    }  # fmt: skip
    made = {name: make_chunking(name, None, 64, 8, StepCostModel()) for name in CHUNKINGS}
    assert {name: type(policy) for name, policy in made.items()} == {
        "static": StaticBatch, "whole": WholePrompt, "fixed": FixedChunk, "fine": FineChunk
    }  # fmt: skip
    assert [make_chunking("fixed", size, 64, 8, StepCostModel()).size for size in (None, 5)] == [  # type: ignore[attr-defined]
        64, 5
    ]  # fmt: skip
    capacities = {name: type(make_capacity(name, 4, 16)) for name in CAPACITIES}
    assert capacities == {"max-utilization": MaxUtilization, "no-evict": NoEvict}
    with pytest.raises(ConfigError, match="order is 'lifo'"):
        make_order("lifo", len, StepCostModel(), OutputLengths(), 64)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chunking is 'big'"):
        make_chunking("big", None, 64, 8, StepCostModel())
    with pytest.raises(ConfigError, match="capacity is 'hope'"):
        make_capacity("hope", 4, 16)
