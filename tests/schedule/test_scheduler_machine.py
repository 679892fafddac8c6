"""Whatever comes in whatever order: blocks are conserved, and nobody reads a foreign one."""

from __future__ import annotations

from collections.abc import Sequence as Row

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.scheduling import FakeEngine, contents, live_tokens, make_engine

from trimaran.cache.hash_index import HashIndex, block_hash
from trimaran.cache.manager import KVCacheManager
from trimaran.cache.radix_index import RadixIndex
from trimaran.core.config import CAPACITIES, CHUNKINGS, ORDERS
from trimaran.core.errors import CapacityError
from trimaran.core.namespace import Namespace
from trimaran.core.request import FinishReason, Sequence, SequenceStatus
from trimaran.core.retention import Retention
from trimaran.core.slo import BATCH, STANDARD, SloClass
from trimaran.schedule.capacity import MaxUtilization
from trimaran.schedule.scheduler import ScheduledStep

STEMS = ([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 2, 2, 1, 1], [1] * 14, [])
PROMPTS = st.builds(
    lambda stem, cut, tail: [*stem[:cut], *tail],
    st.sampled_from(STEMS),
    st.integers(0, 14),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)


class AnyVictim(MaxUtilization):
    """Preempts anyone, also those that are in the step already."""

    def __init__(self) -> None:
        self.count = 0

    def victim(self, running, needy):  # type: ignore[no-untyped-def]
        self.count += 7
        return running[self.count % len(running)]


class WatchedHashIndex(HashIndex):
    """Counts evictions."""

    evictions = 0

    def evict(self) -> int:
        self.evictions += 1
        return super().evict()


class WatchedRadixIndex(RadixIndex):
    """Counts evictions."""

    evictions = 0

    def evict(self) -> int:
        self.evictions += 1
        return super().evict()


Prefix = tuple[Namespace, tuple[int, ...]]


class SchedulerMachine(RuleBasedStateMachine):
    radix = False
    engine: FakeEngine
    index: WatchedHashIndex | WatchedRadixIndex

    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        keys=st.sampled_from([0, 0, 2, 5]),
        orderly=st.booleans(),
        order=st.sampled_from(ORDERS),
        chunking=st.sampled_from(CHUNKINGS),
        capacity=st.sampled_from(CAPACITIES),
    )
    def start(  # type: ignore[no-untyped-def]
        self, num_blocks, block_size, max_num_seqs, budget, keys, orderly, order, chunking, capacity
    ):
        if chunking == "static" and order == "longest-prefix":
            order = "fcfs"  # which don't go together
        self.collides = keys > 0 and not self.radix
        self.index = (
            WatchedRadixIndex(block_size)
            if self.radix
            else WatchedHashIndex(
                block_size, (lambda parent, t: block_hash(parent, t) % keys) if keys else block_hash
            )
        )
        self.kv = KVCacheManager(num_blocks, block_size, index=self.index)
        self.orderly = orderly
        self.engine = make_engine(
            kv=self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            capacity=capacity if orderly else AnyVictim(),
            order=order,
            chunking=chunking,
        )
        self.promises = orderly and capacity == "no-evict"
        self.whole = chunking in ("whole", "static")
        self.capacity = num_blocks * block_size
        self.seats, self.budget = max_num_seqs, budget
        self.added: list[Sequence] = []
        self.full: set[Prefix] = set()  # committed, in full blocks
        self.committed: set[Prefix] = set()  # as far as a step got
        self.unstored: set[Sequence] = set()  # ran while the index was cleared

    # ------------------------------------------------------------------ what can happen

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from(["", "", "a"]),
        adapter=st.sampled_from(["", "", "a"]),
        retention=st.sampled_from([None, None, Retention(80, 5.0), Retention(10)]),
        scored=st.booleans(),
        more=st.integers(1, 12),
        priority=st.integers(-2, 2),
        slo=st.sampled_from([STANDARD, BATCH, SloClass("fast", tpot=0.004)]),
        times=st.sampled_from([1, 1, 2, 3]),
    )
    def add(  # type: ignore[no-untyped-def]
        self, prompt, n, salt, adapter, retention, scored, more, priority, slo, times
    ):
        prompt = prompt[: self.capacity]
        if self.promises:  # as an engine sees to, no sequence is longer than the cache
            more = min(more, max(1, self.capacity - len(prompt)))
        for _ in range(times):  # equal prompts are computed at the same time
            try:
                added = self.engine.add(
                    prompt,
                    more,
                    n=min(n, self.seats),
                    salt=salt,
                    adapter=adapter,
                    retention=retention,
                    prompt_logprobs=0 if scored else None,
                    priority=priority,
                    slo=slo,
                )
            except CapacityError:
                assert self.promises, "whose prompt fits is refused"
                continue
            self.added.append(added)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds):  # type: ignore[no-untyped-def]
        self.engine.clock.advance(seconds)

    @rule(times=st.integers(1, 4))
    def step(self, times):  # type: ignore[no-untyped-def]
        for _ in range(times):
            step = self.schedule()
            if step is not None:
                self.finish_step(step)
                self.check()

    @rule(data=st.data())
    def step_with_abort_inside(self, data):  # type: ignore[no-untyped-def]
        step = self.schedule()
        if step is not None:
            self.abort(data)
            self.finish_step(step)

    @rule()
    def step_that_fails(self):  # type: ignore[no-untyped-def]
        step = self.schedule()
        if step is not None:
            for sequence in self.engine.scheduler.lost_with(step):
                if sequence.request in self.engine.live:
                    self.engine.end(sequence.request, FinishReason.ERROR)

    @rule(data=st.data())
    def abort(self, data):  # type: ignore[no-untyped-def]
        if self.engine.live:
            self.engine.end(data.draw(st.sampled_from(list(self.engine.live))))

    @rule(data=st.data())
    def abort_one_of_several(self, data):  # type: ignore[no-untyped-def]
        sequences = [s for group in self.engine.live.values() for s in group if s.forked]
        if sequences:
            self.engine.end_one(data.draw(st.sampled_from(sequences)), FinishReason.STOP)

    @rule(count=st.integers(1, 3))
    def evict(self, count):  # type: ignore[no-untyped-def]
        blocks = self.kv.pool.allocate(min(self.kv.pool.available, count))
        for block in blocks or []:
            self.kv.pool.release(block)

    @precondition(lambda self: self.engine.live)
    @rule()
    def reset(self):  # type: ignore[no-untyped-def]
        self.kv.reset_prefix_cache()
        self.full.clear()
        self.committed.clear()
        self.unstored = set(self.engine.scheduler.running())
        assert self.kv.usage().cached == 0 and len(self.index) == 0

    # ------------------------------------------------------------------ the step, checked

    def schedule(self) -> ScheduledStep | None:
        waiting = {s: s.cached for s in self.engine.scheduler.waiting()}
        clean = self.index.evictions == 0 and not self.collides
        full, committed = set(self.full), set(self.committed)
        step = self.engine.schedule()
        if step is None:
            assert not self.engine.scheduler.has_work(), "there is work, and nothing runs"
            return None
        rows = sum(entry.count for entry in step.entries)
        assert rows <= self.budget or (self.whole and len(step.entries) == 1)
        if self.whole:
            assert all(entry.samples for entry in step.entries)
        if self.promises:
            assert not step.preempted, "who was promised blocks is preempted"
        self.unstored -= set(step.preempted)
        chosen = {entry.sequence for entry in step.entries}
        for sequence in step.preempted:
            assert not sequence.finished and sequence.preemptions > 0
            assert sequence.status is SequenceStatus.WAITING or sequence in chosen
        for entry in step.entries:
            sequence = entry.sequence
            assert sequence.status is SequenceStatus.RUNNING
            if sequence not in waiting:
                continue
            least, most = self.longest(sequence, full), self.longest(sequence, committed)
            if sequence.request.params.prompt_logprobs is not None and not sequence.output:
                assert entry.start == 0
            elif clean and self.index.evictions == 0:
                assert least <= entry.start <= most
                assert self.radix or least == most
            else:
                assert entry.start <= most
            if sequence.preemptions == 0:
                assert sequence.cached == entry.start < sequence.prompt_length
            else:
                assert sequence.cached == waiting[sequence]
        return step

    def longest(self, sequence: Sequence, stored: set[Prefix]) -> int:
        """The longest stored prefix that leaves a token over, in full blocks or to the token."""
        namespace, tokens = sequence.request.namespace, sequence.tokens[:-1]
        prefixes = [prefix for name, prefix in stored if name == namespace]
        hit = max((common(prefix, tokens) for prefix in prefixes), default=0)
        return hit if self.radix else hit - hit % self.kv.block_size

    def finish_step(self, step: ScheduledStep) -> None:
        ended = [entry.sequence.finished for entry in step.entries]
        self.engine.complete(step)
        size = self.kv.block_size
        for entry, gone in zip(step.entries, ended, strict=True):
            sequence = entry.sequence
            if not gone and sequence not in self.unstored:
                namespace, end = sequence.request.namespace, entry.start + entry.count
                self.full.add((namespace, tuple(sequence.tokens[: end - end % size])))
                self.committed.add((namespace, tuple(sequence.tokens[:end])))

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.held + usage.cached == usage.total
        self.check_sequences()
        self.check_stored()

    def check_sequences(self) -> None:
        scheduler = self.engine.scheduler
        scheduler._running.check()
        assert scheduler.live_tokens() == live_tokens(self.kv)
        running, waiting = list(scheduler.running()), list(scheduler.waiting())
        live = [s for group in self.engine.live.values() for s in group]
        assert sorted(map(id, running + waiting)) == sorted(map(id, live))
        assert all(s.status is SequenceStatus.RUNNING for s in running)
        assert all(s.status is SequenceStatus.WAITING and s.computed == 0 for s in waiting)
        assert not any(self.kv.block_table(s) for s in [*waiting, *self.engine.done])
        assert len(running) <= self.seats
        ended = self.engine.done
        assert len(set(ended)) == len(ended) and all(s.finished for s in ended)
        assert {s.request for s in ended} | set(self.engine.live) == {s.request for s in self.added}
        if not running:
            assert self.kv.usage().held == 0

    def check_stored(self) -> None:
        """A stored block holds what it is stored under, and was committed."""
        size = self.kv.block_size
        for block in range(self.kv.num_blocks):
            if block in self.index:
                namespace, tokens = self.index.prefix(block)
                assert any(
                    name == namespace and common(prefix, tokens) == len(tokens)
                    for name, prefix in self.committed
                )
                here = contents(namespace, tokens)[(len(tokens) - 1) // size * size :]
                assert self.engine.backend.block(block)[: len(here)] == here
                assert self.radix or len(here) == size

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.orderly:
            total = sum(len(s.request.prompt) + 14 for s in self.added)
            for _ in range(50 + 10 * total * self.seats):
                step = self.schedule()
                if step is None:
                    break
                self.finish_step(step)
        else:
            for request in list(self.engine.live):
                self.engine.end(request)
        assert not self.engine.scheduler.has_work()
        self.check()


class RadixSchedulerMachine(SchedulerMachine):
    radix = True


def common(one: Row[int], two: Row[int]) -> int:
    """Tokens with which both begin."""
    length = 0
    for left, right in zip(one, two, strict=False):
        if left != right:
            break
        length += 1
    return length


@pytest.mark.parametrize("machine", [SchedulerMachine, RadixSchedulerMachine])
def test_any_history_conserves_blocks_and_contents(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
