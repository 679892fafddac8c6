"""What the scheduler promises, one promise at a time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import FakeEngine, make_engine

from trimaran.core.errors import CapacityError
from trimaran.core.request import FinishReason, Request, Sequence, SequenceStatus
from trimaran.core.sampling_params import SamplingParams
from trimaran.schedule.capacity import MaxUtilization
from trimaran.schedule.chunking import FixedChunk


def names(sequences: object) -> list[str]:
    return [sequence.id for sequence in sequences]  # type: ignore[attr-defined]


def outputs(engine: FakeEngine) -> dict[str, list[int]]:
    return {sequence.id: sequence.output for sequence in engine.done}


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    stems = [[draw.randrange(50) for _ in range(longest // 2)] for _ in range(3)]
    return [
        draw.choice(stems)[: draw.randrange(longest // 2)]
        + [draw.randrange(50) for _ in range(draw.randrange(1, longest // 2))]
        for _ in range(count)
    ]


# ---------------------------------------------------------------------- a step


def test_nothing_to_run() -> None:
    engine = make_engine()
    assert engine.scheduler.schedule() is None
    assert not engine.scheduler.has_work()
    engine.add([1, 2], 1)
    assert engine.scheduler.has_work()
    engine.drain()
    assert engine.scheduler.schedule() is None


def test_a_long_prompt_is_chunked_to_what_decodes_leave() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add([1, 2], 20)
    engine.step()
    engine.add(list(range(20)), 2)
    steps = [engine.step() for _ in range(4)]
    shape = [[(e.sequence.id, e.start, e.count, e.samples) for e in s.entries] for s in steps if s]
    assert shape == [
        [("r0", 2, 1, True), ("r1", 0, 7, False)],
        [("r0", 3, 1, True), ("r1", 7, 7, False)],
        [("r0", 4, 1, True), ("r1", 14, 6, True)],
        [("r0", 5, 1, True), ("r1", 20, 1, True)],
    ]
    counted = [(s.prefill_tokens, s.decode_tokens) for s in steps if s]
    assert counted == [(7, 1), (7, 1), (6, 1), (0, 2)]


def test_admission_is_in_order_of_arrival_up_to_the_seats() -> None:
    engine = make_engine(max_num_seqs=2)
    for length in (5, 3, 1):
        engine.add([length] * length, length)
    engine.step()
    assert names(engine.scheduler.running()) == ["r0", "r1"]
    assert names(engine.scheduler.waiting()) == ["r2"]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.drain()
    assert names(engine.done) == ["r1", "r2", "r0"]


def test_the_head_blocks_those_that_would_fit() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    engine.add([1] * 9, 3)
    engine.step()
    engine.add([2] * 9, 1)
    engine.add([3], 1)
    engine.step()
    assert names(engine.scheduler.running()) == ["r0"]
    engine.drain()
    assert names(engine.done) == ["r0", "r1", "r2"]


def test_time_is_that_of_the_clock() -> None:
    engine = make_engine()
    engine.clock.advance(7.5)
    engine.add([1], 1)
    step = engine.step()
    assert step is not None
    assert step.time == 7.5


# ---------------------------------------------------------------------- prefixes


def test_a_prefix_is_found_at_admission_and_reported_once() -> None:
    engine = make_engine(block_size=4)
    first = engine.add(list(range(10)), 2)
    engine.drain()
    second = engine.add(list(range(10)), 2)
    step = engine.step()
    assert step is not None
    assert (first.cached, second.cached) == (0, 8)
    assert [(e.start, e.count, e.samples) for e in step.entries] == [(8, 2, True)]
    engine.drain()
    assert first.output == second.output


def test_what_was_generated_is_found_too() -> None:
    engine = make_engine(block_size=4)
    first = engine.add([1, 2, 3], 7)
    for _ in range(6):
        engine.step()
    assert engine.kv.match(Sequence(first.request, 0, first.tokens)).tokens == 8
    assert first.computed == 8


def test_rows_to_score_are_computed_whatever_is_cached() -> None:
    engine = make_engine(block_size=4)
    engine.add(list(range(10)), 1)
    engine.drain()
    scored = engine.add(list(range(10)), 3, prompt_logprobs=1)
    step = engine.step()
    assert step is not None
    assert scored.cached == 0
    assert step.entries[0].logits == slice(0, 10)
    assert step.plan.logit_rows.tolist() == list(range(10))
    step = engine.step()
    assert step is not None
    assert step.entries[0].logits == slice(0, 1)


def test_a_preempted_sequence_finds_its_own_prefix_and_reports_the_first_hit() -> None:
    engine = make_engine(num_blocks=8, block_size=4)
    first = engine.add([1] * 16, 9)  # grows into its sixth block and then some
    second = engine.add([2] * 14, 4)
    engine.step()
    assert engine.scheduler.num_running == 2
    engine.drain()
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert second.cached == 0
    usage = engine.kv.usage()
    assert (usage.queried_tokens, usage.hit_tokens) == (30, 0)  # as first admitted
    assert usage.resumed_tokens > 0
    alone = make_engine(num_blocks=8, block_size=4)
    alone.add([0], 1)
    alone.add([2] * 14, 4)
    alone.drain()
    assert second.output == outputs(alone)["r1"]


# ---------------------------------------------------------------------- preemption


def test_the_last_admitted_gives_way_and_comes_back_first() -> None:
    engine = make_engine(num_blocks=6, block_size=2)
    for token in (1, 2, 3):
        engine.add([token] * 3, 6)
    engine.step()
    engine.add([4] * 3, 6)
    preempted: list[str] = []
    while not preempted:
        step = engine.step()
        assert step is not None
        preempted = names(step.preempted)
    assert preempted == ["r2"]
    assert names(engine.scheduler.waiting()) == ["r2", "r3"]
    engine.drain()
    assert names(engine.done) == ["r0", "r1", "r2", "r3"]


def test_two_victims_of_one_step_keep_their_order() -> None:
    engine = make_engine(num_blocks=5, block_size=2)
    for token in (1, 2, 3):
        engine.add([token], 9)
    engine.step()  # a block each, two are left
    step = engine.step()
    assert step is not None
    assert step.preempted == []
    while engine.scheduler.num_running > 1:
        engine.step()
    assert names(engine.scheduler.running()) == ["r0"]
    assert names(engine.scheduler.waiting()) == ["r1", "r2"]
    engine.drain()
    assert sorted(names(engine.done)) == ["r0", "r1", "r2"]


def test_a_step_whose_whole_budget_went_to_a_victim_is_made_anew() -> None:
    engine = make_engine(num_blocks=3, block_size=2, max_num_seqs=2, max_num_batched_tokens=1)
    engine.add([0, 1, 0, 0], 3, n=2)
    while engine.scheduler.has_work():
        assert engine.step() is not None
    assert sorted(names(engine.done)) == ["r0", "r0#1"]
    assert engine.failed == []


def test_a_victim_that_ended_before_the_next_step_is_not_reported() -> None:
    engine = make_engine()
    stays, goes = engine.add([1] * 3, 5), engine.add([2] * 3, 5)
    engine.step()
    for each in (goes, stays):  # as when another sequence outgrew the cache in that call
        engine.scheduler._preempt(each)
    engine.end(goes.request)
    step = engine.step()
    assert step is not None
    assert step.preempted == [stays]


class TakeTheFirst(MaxUtilization):
    """Preempts who was admitted first, even when it is in the step already."""

    def victim(self, running, needy):  # type: ignore[no-untyped-def]
        return running[0]


def test_a_victim_that_was_in_the_step_is_taken_out_of_it() -> None:
    engine = make_engine(num_blocks=5, block_size=2, capacity=TakeTheFirst())
    engine.add([1] * 4, 3)
    engine.add([2] * 4, 3)
    engine.step()
    step = engine.step()
    assert step is not None
    assert names(step.preempted) == ["r0"]
    assert names(e.sequence for e in step.entries) == ["r1"]
    engine.drain()
    assert sorted(names(engine.done)) == ["r0", "r1"]


def test_whose_copy_was_in_a_failed_step_is_lost_with_it() -> None:
    engine = make_engine(block_size=4, max_num_seqs=4, chunking="whole", max_num_batched_tokens=6)
    engine.add([1] * 6, 9, n=2)
    engine.step()
    engine.add([2] * 6, 2)  # comes before those that run, and has all the budget
    step = engine.schedule()
    assert step is not None
    assert names(e.sequence for e in step.entries) == ["r1"]
    assert len(step.plan.copies) == 1
    lost = engine.scheduler.lost_with(step)
    assert len(lost) == 2
    assert lost[1].request.id == "r0"


# ---------------------------------------------------------------------- what can't fit


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    engine = make_engine(num_blocks=2, block_size=4)
    with pytest.raises(CapacityError, match=r"'r0' needs KV blocks for 9 tokens.*kv_cache_bytes"):
        engine.add([1] * 9, 1)
    assert not engine.scheduler.has_work()


def test_more_sequences_than_seats_are_refused() -> None:
    engine = make_engine(max_num_seqs=2)
    with pytest.raises(CapacityError, match="n is 3, above max_num_seqs 2"):
        engine.add([1], 1, n=3)


def test_who_outgrows_the_cache_is_named_and_the_others_go_on() -> None:
    engine = make_engine(num_blocks=4, block_size=2, max_num_seqs=3)
    engine.add([1] * 6, 9)
    small = [engine.add([token], 2) for token in (2, 3)]
    engine.drain()
    assert engine.failed == ["r0"]
    assert all(s.output_length == 2 for s in small)
    assert engine.kv.usage().held == 0


def test_who_can_never_go_on_preempts_nobody() -> None:
    engine = make_engine(num_blocks=4, block_size=2)
    parent = engine.add([1] * 8, 5, n=2)  # both hold all there is
    engine.step()
    both = list(engine.scheduler.running())
    with pytest.raises(CapacityError, match="9 tokens") as raised:
        engine.scheduler.schedule()
    assert raised.value.request_id == parent.request.id
    assert [s.preemptions for s in both] == [0, 0]


# ---------------------------------------------------------------------- n > 1


def test_seats_are_kept_for_forks_that_are_to_come() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=8)
    engine.add([1] * 12, 3, n=3)  # takes two steps until it forks
    for token in (2, 3):
        engine.add([token], 3)
    engine.step()
    engine.step()
    assert names(engine.scheduler.running()) == ["r0", "r0#1", "r0#2", "r1"]
    engine.drain()
    assert len(engine.done) == 5


def test_who_waits_for_n_seats_waits_until_they_are_free() -> None:
    engine = make_engine(max_num_seqs=3)
    engine.add([1], 3)
    engine.step()
    engine.add([2], 2, n=3)
    engine.step()
    assert names(engine.scheduler.waiting()) == ["r1"]
    engine.drain()
    assert sorted(names(engine.done)) == ["r0", "r1", "r1#1", "r1#2"]


def test_kept_seats_go_with_the_sequence_they_were_kept_for() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=4)
    first = engine.add([1] * 9, 2, n=3)
    engine.step()
    engine.end(first.request)
    for token in (2, 3, 4):
        engine.add([token], 2)
    engine.step()
    assert engine.scheduler.num_running == 3


def test_forks_come_after_their_parent_and_share_its_blocks() -> None:
    engine = make_engine(block_size=4)
    engine.add([1] * 6, 3, n=2)
    engine.add([2] * 6, 3)
    engine.step()
    running = list(engine.scheduler.running())
    assert names(running) == ["r0", "r0#1", "r1"]
    assert engine.kv.block_table(running[0]) == engine.kv.block_table(running[1])
    step = engine.step()
    assert step is not None
    assert len(step.plan.copies) == 1
    engine.drain()


def test_a_fork_without_a_seat_is_an_error_of_the_caller() -> None:
    engine = make_engine()
    parent = engine.add([1] * 6, 3)
    engine.step()
    child = Sequence(parent.request, 1, list(parent.tokens))
    with pytest.raises(AssertionError, match="no seat"):
        engine.scheduler.fork(parent, child)


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("when", ["waiting", "running", "between"])
def test_an_end_frees_everything_at_once(when: str) -> None:
    engine = make_engine(max_num_seqs=1 if when == "waiting" else 4)
    engine.add([1] * 6, 3)
    if when == "waiting":
        engine.step()
    target = engine.add([2] * 9, 3)
    step = None
    if when == "running":
        engine.step()
        assert engine.kv.block_table(target)
    elif when == "between":
        step = engine.schedule()
        assert target in [e.sequence for e in step.entries]  # type: ignore[union-attr]
    engine.end(target.request)
    assert engine.kv.block_table(target) == []
    engine.kv.check()
    if step is not None:
        engine.complete(step)
    assert target.computed < target.total
    assert target.finish_reason is FinishReason.ABORT
    engine.drain()
    assert names(engine.done) == ["r1", "r0"]


def test_the_first_end_counts() -> None:
    engine = make_engine()
    sequence = engine.add([1], 3)
    engine.end(sequence.request)
    engine.scheduler.finish(sequence, FinishReason.ERROR)
    assert sequence.finish_reason is FinishReason.ABORT


def test_a_sequence_that_was_never_added_can_be_ended() -> None:
    engine = make_engine()
    stranger = Sequence(Request("x", [1], SamplingParams()), 0, [1])
    engine.scheduler.finish(stranger, FinishReason.ABORT)
    assert stranger.status is SequenceStatus.FINISHED


# ---------------------------------------------------------------------- nobody starves


def forked(running: int, budget: int) -> FakeEngine:
    """So many sequences that decode: of one request, as others wait for budget."""
    engine = make_engine(
        num_blocks=300, max_num_seqs=running, max_num_batched_tokens=budget, prefix_cache=False
    )
    engine.add([1], 1000, n=running)
    engine.step()
    assert engine.scheduler.num_running == running
    return engine


@given(running=st.integers(1, 9), budget=st.integers(1, 12))
def test_all_that_decode_are_served_in_turn(running: int, budget: int) -> None:
    engine = forked(running, budget)
    since = dict.fromkeys(engine.scheduler.running(), 0)
    for _ in range(3 * running):
        step = engine.step()
        assert step is not None
        assert len(step.entries) == min(running, budget)
        since = {sequence: steps + 1 for sequence, steps in since.items()}
        assert max(since.values()) <= -(-running // budget)
        since.update(dict.fromkeys((entry.sequence for entry in step.entries), 0))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    budget=st.integers(1, 6),
    ends=st.lists(st.integers(0, 6), max_size=4),
)
def test_each_that_runs_is_served_within_as_many_steps_as_run(
    lengths: list[int], budget: int, ends: list[int]
) -> None:
    """Prompts and decodes mixed, and some end while it is their turn."""
    engine = make_engine(
        num_blocks=200, max_num_seqs=len(lengths), max_num_batched_tokens=budget,
        prefix_cache=False,
    )  # fmt: skip
    for token, length in enumerate(lengths):
        engine.add([token] * length, 30)
    since: dict[Sequence, int] = {}
    for number in range(120):
        step = engine.step()
        if step is None:
            break
        for sequence in engine.scheduler.running():
            since[sequence] = since.get(sequence, 0) + 1
        for entry in step.entries:
            since[entry.sequence] = 0
        assert max(since.values()) <= len(lengths)
        if number % 9 == 8 and ends:
            turn = engine.scheduler._turn
            live = list(engine.scheduler.running())
            which = live[ends.pop() % len(live)] if turn is None and live else turn
            if which is not None:
                engine.end(which.request)
        since = {s: steps for s, steps in since.items() if not s.finished}


def test_the_turn_passes_to_the_next_when_its_owner_ends() -> None:
    engine = forked(4, 1)
    order = list(engine.scheduler.running())
    served = [engine.step().entries[0].sequence for _ in range(2)]  # type: ignore[union-attr]
    assert served == order[:2]
    engine.end_one(order[2], FinishReason.STOP)
    served = [engine.step().entries[0].sequence for _ in range(3)]  # type: ignore[union-attr]
    assert served == [order[3], order[0], order[1]]


@pytest.mark.parametrize("budget", [4, 16, 64])
def test_a_long_request_ends_under_a_stream_of_short_ones(budget: int) -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=budget)
    for _ in range(4):
        engine.add([7] * 5, 3)
    long = engine.add([9] * 40, 20)
    steps = 0
    while not long.finished:
        engine.add([steps % 5] * 5, 3)
        engine.step()
        steps += 1
        assert steps < 4 * (3 + 5) + (40 + 20) * 4, "starved"


# ---------------------------------------------------------------------- all together


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "size", "seqs", "budget", "chunk"),
    [(400, 16, 64, 2048, 2048), (30, 4, 16, 32, 7), (60, 2, 32, 5, 5), (16, 8, 8, 64, 3)],
)
def test_outputs_do_not_depend_on_the_schedule(
    num_blocks: int, size: int, seqs: int, budget: int, chunk: int, prefix_cache: bool
) -> None:
    expected: dict[str, list[int]] = {}
    alone = make_engine(num_blocks=100, max_num_seqs=2)
    given_prompts = prompts(60, seed=3)
    for number, prompt in enumerate(given_prompts):
        alone.add(prompt, 1 + number % 17, n=1 + (number % 5 == 0))
        alone.drain()
    expected = outputs(alone)
    engine = make_engine(
        num_blocks, size, max_num_seqs=seqs, max_num_batched_tokens=budget,
        prefix_cache=prefix_cache, chunking=FixedChunk(chunk),
    )  # fmt: skip
    for number, prompt in enumerate(given_prompts):
        engine.add(prompt, 1 + number % 17, n=1 + (number % 5 == 0))
    engine.drain()
    assert engine.failed == []
    assert outputs(engine) == expected
    assert len(engine.done) == 72
    assert engine.kv.usage().held == 0
    engine.kv.check()
