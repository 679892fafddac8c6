"""Whatever comes in whatever order, with tiers below the pool that fail at any time: blocks are
conserved, nobody reads a foreign one, and everybody's output is what it would be alone."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.scheduling import contents, live_tokens
from support.tiers import TieredEngine, make_tiered

from trimaran.core.request import FinishReason, Sequence, SequenceStatus

STEMS = ([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 2, 2, 1, 1], [1] * 14, [])
PROMPTS = st.builds(
    lambda stem, cut, tail: [*stem[:cut], *tail],
    st.sampled_from(STEMS),
    st.integers(0, 14),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)


class TiersMachine(RuleBasedStateMachine):
    engine: TieredEngine

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 2, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        host_blocks=st.sampled_from([0, 1, 5, 30]),
        disk_blocks=st.sampled_from([0, 3, 12, 100]),
        index=st.sampled_from(["hash", "radix"]),
        order=st.sampled_from(["fcfs", "longest-prefix"]),
        capacity=st.sampled_from(["max-utilization", "max-utilization", "no-evict"]),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, budget, host_blocks, disk_blocks, **policies
    ):  # type: ignore[no-untyped-def]
        if not host_blocks and not disk_blocks:
            disk_blocks = 100
        self.options = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "budget": budget,
            "host_blocks": host_blocks,
            "disk_path": self.folder if disk_blocks else None,
            "disk_blocks": disk_blocks,
            **policies,
        }
        self.capacity = num_blocks * block_size
        self.seats = max_num_seqs
        self.restart()

    def restart(self) -> None:
        self.engine = make_tiered(**self.options)  # type: ignore[arg-type]
        self.known: dict[int, bytes] = {}
        self.engine.kv.content.observers.append(self)  # type: ignore[union-attr]
        self.added: list[Sequence] = []

    # ------------------------------------------------------------------ what it observes

    def stored(self, stored) -> None:  # type: ignore[no-untyped-def]
        assert stored.block not in self.known
        self.known[stored.block] = stored.digest

    def used(self, found) -> None:  # type: ignore[no-untyped-def]
        assert all(self.known[stored.block] == stored.digest for stored in found)

    def removed(self, stored) -> None:  # type: ignore[no-untyped-def]
        assert self.known.pop(stored.block) == stored.digest

    def cleared(self) -> None:
        self.known.clear()

    # ------------------------------------------------------------------ what can happen

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 1, 2]),
        salt=st.sampled_from(["", "", "a"]),
        scored=st.sampled_from([False, False, True]),
        more=st.integers(1, 12),
        times=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, prompt, n, salt, scored, more, times):  # type: ignore[no-untyped-def]
        if self.options["capacity"] == "no-evict":  # then nobody may outgrow the cache
            n, more = 1, min(more, self.capacity - 1)
            prompt = prompt[: self.capacity - more]
        for _ in range(times):
            self.added.append(
                self.engine.add(
                    prompt[: self.capacity],
                    more,
                    n=min(n, self.seats),
                    salt=salt,
                    prompt_logprobs=0 if scored else None,
                )
            )

    @rule(times=st.integers(1, 6), transfers=st.sampled_from([0, 1, 30]))
    def step(self, times, transfers):  # type: ignore[no-untyped-def]
        for _ in range(times):
            if self.engine.step() is not None:
                self.engine.clock.advance(1e-3)
            self.engine.transfers(transfers)
            self.check()

    @rule(
        stem=st.sampled_from(STEMS),
        times=st.integers(1, 2),
        steps=st.integers(1, 6),
        amid=st.integers(0, 4),
    )
    def come_back(self, stem, times, steps, amid):  # type: ignore[no-untyped-def]
        """Prompts that come again after the pool has given up all that it could."""
        for _ in range(1 + times):
            self.added.append(self.engine.add([*stem, 1][: self.capacity - 3], 2))
            self.step(steps, 30)
            self.evict(self.engine.kv.num_blocks)
        self.added.append(self.engine.add([*stem, 2][: self.capacity - 3], 2))
        self.engine.step()
        self.engine.transfers(amid)

    @rule(times=st.integers(1, 12))
    def transfer(self, times):  # type: ignore[no-untyped-def]
        for _ in range(times):
            self.engine.work.run_one()
            self.check()

    @rule(transfers=st.integers(0, 3), during=st.integers(0, 3))
    def step_with_transfers_inside(self, transfers, during):  # type: ignore[no-untyped-def]
        step = self.engine.schedule()
        self.engine.transfers(transfers)
        if step is not None:
            self.engine.backend.run(step)  # and again in `complete`: it changes nothing
            self.engine.transfers(during)
            self.engine.complete(step)

    @rule(data=st.data())
    def step_with_abort_inside(self, data):  # type: ignore[no-untyped-def]
        step = self.engine.schedule()
        if step is not None:
            self.abort(data)
            self.engine.complete(step)

    @rule()
    def step_that_fails(self):  # type: ignore[no-untyped-def]
        step = self.engine.schedule()
        if step is not None:
            for entry in step.entries:
                if entry.sequence.request in self.engine.live:
                    self.engine.end(entry.sequence.request, FinishReason.ERROR)

    @rule(data=st.data())
    def abort(self, data):  # type: ignore[no-untyped-def]
        if self.engine.live:
            self.engine.end(data.draw(st.sampled_from(list(self.engine.live))))

    @rule(count=st.integers(1, 20))
    def evict(self, count):  # type: ignore[no-untyped-def]
        pool = self.engine.kv.pool
        for block in pool.allocate(min(pool.available, count)) or []:
            pool.release(block)

    @rule()
    def reset(self):  # type: ignore[no-untyped-def]
        self.engine.kv.reset_prefix_cache()
        assert not self.known

    @rule(seconds=st.sampled_from([0.001, 0.1, 100.0]))
    def time_passes(self, seconds):  # type: ignore[no-untyped-def]
        self.engine.clock.advance(seconds)

    @rule(at=st.integers(0, 1 << 20), cut=st.booleans())
    def damage_files(self, at, cut):  # type: ignore[no-untyped-def]
        places = sorted(self.folder.rglob("*.kv"))
        if places:
            place = places[at % len(places)]
            data = bytearray(place.read_bytes())
            data[at % len(data)] ^= 1
            place.write_bytes(data[: at % len(data)] if cut else data)

    @rule()
    def lose_files(self):  # type: ignore[no-untyped-def]
        for place in self.folder.rglob("*.kv"):
            place.unlink()

    @rule()
    def lose_host(self):  # type: ignore[no-untyped-def]
        if self.engine.host is not None:
            self.engine.host.clear()

    @rule()
    def restart_the_engine(self):  # type: ignore[no-untyped-def]
        self.finish_all()
        self.restart()

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        kv, scheduler = engine.kv, engine.scheduler
        kv.check()
        usage = kv.usage()
        assert usage.free + usage.held + usage.cached == usage.total
        assert scheduler.live_tokens() == live_tokens(kv)
        running, waiting = list(scheduler.running()), list(scheduler.waiting())
        live = [s for group in engine.live.values() for s in group]
        assert sorted(map(id, running + waiting)) == sorted(map(id, live))
        assert scheduler.num_waiting == len(waiting)
        states = {SequenceStatus.WAITING, SequenceStatus.LOADING}
        assert all(s.status in states and s.computed == 0 for s in waiting)
        loading = scheduler.loading
        assert loading is not None
        assert {s for s in waiting if s.status is SequenceStatus.LOADING} == set(loading)
        assert len(running) + len(loading) <= self.seats
        assert not any(kv.block_table(s) for s in [*waiting, *engine.done])
        if not running and not loading.tiers.loading:
            assert usage.held == 0
        assert {s.block: s.digest for s in kv.content} == self.known  # type: ignore[union-attr]
        self.check_stored()
        if engine.host is not None:
            engine.host.check()
        if engine.disk is not None:
            files = [p.stat().st_size for p in self.folder.rglob("*.kv")]
            assert sum(files) <= engine.disk.max_bytes

    def check_stored(self) -> None:
        """A stored block holds what it is stored under."""
        kv = self.engine.kv
        for block in self.known:
            namespace, tokens = kv.index.prefix(block)
            assert self.engine.backend.block(block) == contents(namespace, tokens)[-kv.block_size :]

    def finish_all(self) -> None:
        self.engine.drain_all()
        self.check()
        assert self.engine.kv.usage().held == 0
        for sequence in self.added:
            if sequence.finish_reason is FinishReason.LENGTH:
                assert sequence.output == self.alone(sequence)

    def alone(self, sequence: Sequence) -> list[int]:
        """What the tokens are, by the fake engine's rule."""
        tokens = list(sequence.request.prompt)
        for _ in range(sequence.output_length):
            context = contents(sequence.request.namespace, tokens)[-1][2]
            tokens.append(hash((context, sequence.index)) % self.engine.vocabulary)
        return tokens[sequence.prompt_length :]

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.finish_all()
        finally:
            shutil.rmtree(self.folder)


def test_any_history_with_tiers_conserves_blocks_and_contents() -> None:
    run_state_machine_as_test(
        TiersMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
