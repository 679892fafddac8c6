"""Sequences that wait for a lower tier: found, waited for, given up, ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import TieredEngine, make_tiered

from trimaran.core.namespace import Namespace
from trimaran.core.request import FinishReason, SequenceStatus

PROMPT = [0, 1, 2, 1, 0, 2, 2, 1, 0, 0, 1, 1, 2]  # three blocks of four, and one token


def run(engine: TieredEngine, prompt: list[int], more: int = 2) -> list[int]:
    sequence = engine.add(prompt, more)
    engine.drain_all()
    assert sequence.finish_reason is FinishReason.LENGTH
    engine.kv.check()
    return sequence.output


def push_out(engine: TieredEngine) -> None:
    """Fills the pool with something else."""
    run(engine, [3] * (engine.kv.num_blocks * 4 - 3))
    assert engine.kv.match_up_to(engine.done[0], 12).tokens == 0


def test_what_the_pool_gave_up_comes_back_from_host_memory() -> None:
    engine = make_tiered(host_blocks=32)
    first = run(engine, PROMPT)
    push_out(engine)
    sequence = engine.add(PROMPT, 2)
    assert engine.step() is None  # it waits, and nobody else is here
    assert sequence.status is SequenceStatus.LOADING and engine.scheduler.num_waiting == 1
    assert engine.kv.usage().held == 3  # by the load
    engine.transfers()
    step = engine.step()
    assert step is not None and step.entries[0].start == 12 == sequence.cached
    engine.drain_all()
    assert sequence.output == first
    assert engine.scheduler.loading.tiers.usage().loaded == 3
    engine.kv.check()


def test_what_is_given_up_before_its_turn_is_copied_then() -> None:
    engine = make_tiered(host_blocks=32)
    first = engine.add(PROMPT, 2)
    while engine.scheduler.has_work():
        engine.step()
    other = engine.add([3] * 61, 2)  # takes the whole pool, and no transfer has run
    while engine.scheduler.has_work():
        engine.step()
    assert engine.work.counts.saved == 0 and engine.work.counts.rescued >= 3
    again = engine.add(PROMPT, 2)
    engine.drain_all()
    assert again.cached == 12 and again.output == first.output
    assert other.cached == 0
    engine.kv.check()


def test_others_step_while_one_loads() -> None:
    engine = make_tiered(num_blocks=24, host_blocks=64)
    run(engine, PROMPT)
    push_out(engine)
    other = engine.add([9, 9, 9], 8)
    engine.step()
    waits = engine.add(PROMPT, 2)
    for _ in range(5):
        step = engine.step()
        assert step is not None and [e.sequence for e in step.entries] == [other]
    assert waits.status is SequenceStatus.LOADING
    engine.transfers()
    step = engine.step()
    assert step is not None and {e.sequence for e in step.entries} == {other, waits}


def test_a_block_goes_to_the_disk_at_its_second_use_and_outlives_the_engine(tmp_path: Path) -> None:
    engine = make_tiered(disk_path=tmp_path)
    first = run(engine, PROMPT)
    assert engine.work.counts.persisted == 0
    run(engine, PROMPT)
    assert engine.work.counts.persisted == 3
    again = make_tiered(disk_path=tmp_path)
    assert run(again, PROMPT) == first
    assert again.done[0].cached == 12 and again.work.counts.loaded == 3
    run(again, PROMPT)
    assert again.work.counts.failed == 0
    assert len(list(tmp_path.rglob("*.kv"))) == 3


def test_salts_are_apart_on_the_disk_too(tmp_path: Path) -> None:
    engine = make_tiered(disk_path=tmp_path)
    for salt in ("a", "a", "b"):
        sequence = engine.add(PROMPT, 2, salt=salt)
        engine.drain_all()
    again = make_tiered(disk_path=tmp_path)
    for salt, cached in (("", 0), ("b", 0), ("a", 12)):
        sequence = again.add(PROMPT, 2, salt=salt)
        again.drain_all()
        assert sequence.cached == cached


def test_a_load_that_ends_early_leaves_the_rest_to_computing(tmp_path: Path) -> None:
    engine = make_tiered(disk_path=tmp_path)
    first = run(engine, PROMPT)
    run(engine, PROMPT)
    content = engine.kv.content
    assert content is not None
    second = list(content.content.chain(content.content.root(Namespace()), PROMPT, 0, 3, 4))[1]
    (place,) = tmp_path.rglob(f"{second.hex()}.kv")
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    again = make_tiered(disk_path=tmp_path)
    assert run(again, PROMPT) == first
    assert again.done[0].cached == 4 and again.work.counts.failed == 1
    assert not place.exists()


def test_who_waits_too_long_computes(tmp_path: Path) -> None:
    engine = make_tiered(host_blocks=32)
    first = run(engine, PROMPT)
    push_out(engine)
    sequence = engine.add(PROMPT, 2)
    assert engine.step() is None
    engine.work.run_one()  # one block came
    engine.clock.advance(60)
    step = engine.step()
    assert step is not None and step.entries[0].start == 0
    assert engine.scheduler.loading.given_up == 1
    engine.drain_all()
    assert sequence.output == first
    engine.kv.check()
    assert engine.kv.usage().held == 0


def test_a_slow_tier_is_not_waited_for() -> None:
    engine = make_tiered(host_blocks=32)
    first = run(engine, PROMPT)
    push_out(engine)
    for _ in range(100):
        engine.work.copying.note(engine.work.block_bytes, 10.0)
    assert run(engine, PROMPT) == first
    assert engine.work.counts.loaded == 0


@pytest.mark.parametrize("moment", ["before", "amid", "after"])
def test_an_abort_while_loading_frees_all(moment: str) -> None:
    engine = make_tiered(host_blocks=32)
    run(engine, PROMPT)
    push_out(engine)
    sequence = engine.add(PROMPT, 2)
    assert engine.step() is None
    engine.transfers({"before": 0, "amid": 1, "after": 10}[moment])
    engine.end(sequence.request)
    assert not engine.scheduler.has_work()
    engine.transfers()
    assert engine.step() is None
    engine.kv.check()
    assert engine.kv.usage().held == 0 and engine.scheduler.loading.tiers.loading == 0


def test_two_who_want_the_same_wait_for_one_load() -> None:
    engine = make_tiered(host_blocks=32)
    first = run(engine, PROMPT)
    push_out(engine)
    both = [engine.add(PROMPT, 2), engine.add([*PROMPT[:12], 2, 2], 2)]
    assert engine.step() is None
    assert {s.status for s in both} == {SequenceStatus.LOADING}
    engine.drain_all()
    assert [s.cached for s in both] == [12, 12] and both[0].output == first
    assert engine.work.counts.loaded == 3


def test_a_prompt_to_be_scored_is_computed() -> None:
    engine = make_tiered(host_blocks=32)
    run(engine, PROMPT)
    push_out(engine)
    sequence = engine.add(PROMPT, 2, prompt_logprobs=0)
    engine.drain_all()
    assert sequence.cached == 0 and engine.work.counts.loaded == 0


def test_a_reset_while_loading_indexes_nothing() -> None:
    engine = make_tiered(host_blocks=32)
    first = run(engine, PROMPT)
    push_out(engine)
    sequence = engine.add(PROMPT, 2)
    assert engine.step() is None
    engine.kv.reset_prefix_cache()
    engine.kv.check()
    engine.drain_all()
    assert sequence.output == first
    engine.kv.check()


def crowd(engine: TieredEngine) -> list[list[int]]:
    """Four sequences that grow out of a pool for two, transfers between the steps."""
    sequences = [engine.add([i, *PROMPT, i, 1], 24) for i in range(4)]
    for _ in range(2000):
        step = engine.step()
        engine.clock.advance(0.0 if step is None else 1e-3 * step.plan.rows)
        engine.transfers(200)
        engine.kv.check()
        if not engine.scheduler.has_work():
            break
    assert all(s.finish_reason is FinishReason.LENGTH for s in sequences)
    return [s.output for s in sequences]


def test_preempted_sequences_come_back_from_host_memory_when_that_is_cheaper() -> None:
    plain = make_tiered(num_blocks=100, host_blocks=1)
    wanted = crowd(plain)
    assert plain.scheduler.loading.moved + plain.scheduler.loading.recomputed == 0
    cheap = make_tiered(num_blocks=20, host_blocks=100)
    assert crowd(cheap) == wanted
    assert cheap.scheduler.loading.moved > 0 and cheap.scheduler.loading.recomputed == 0
    dear = make_tiered(num_blocks=20, host_blocks=100)
    dear.work.copying.note(1, 10.0)
    assert crowd(dear) == wanted
    assert dear.scheduler.loading.recomputed > 0 and dear.work.counts.loaded == 0
    none = make_tiered(num_blocks=20, host_blocks=2)  # too small for one of them
    assert crowd(none) == wanted
    assert none.scheduler.loading.moved == 0


def test_errors_of_the_disk_hurt_nobody_and_are_not_tried_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_tiered(disk_path=tmp_path)
    tries = []

    def refuse(digest: bytes, data: object) -> None:
        tries.append(digest)
        raise OSError(28, "No space left on device")

    assert engine.disk is not None
    monkeypatch.setattr(engine.disk, "write", refuse)
    outputs = [run(engine, PROMPT) for _ in range(5)]
    assert outputs == outputs[:1] * 5
    assert len(tries) == 1
    monkeypatch.undo()
    engine.clock.advance(2)
    run(engine, PROMPT)
    assert engine.work.counts.persisted == 3
