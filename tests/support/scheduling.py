"""A back end without a model, and an engine around it: they know what must lie in which slot.

The fake KV cache keeps, for each slot, the token, its position and a hash of everything
before it under the sequence's salt. Before a step's rows attend, every position below each
row is looked up through the block table and compared: wrong sharing, a missed copy, a stale
prefix hit or a row written into somebody else's block can't go unnoticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimaran.cache.indices import make_index
from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import NoIndex
from trimaran.cache.tiers import KVTiers
from trimaran.core.clock import VirtualClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError
from trimaran.core.namespace import Namespace
from trimaran.core.request import FinishReason, Request, Sequence, SequenceStatus
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import STANDARD, SloClass
from trimaran.schedule.capacity import Capacity
from trimaran.schedule.chunking import Chunking
from trimaran.schedule.scheduler import ScheduledStep, Scheduler

Content = tuple[int, int, int]  # token, position, hash of the prefix that ends with it


def contents(namespace: Namespace, tokens: Iterable[int]) -> list[Content]:
    """What the slots of a sequence must hold, one entry a position."""
    context = int.from_bytes(namespace.digest()[:7], "little")
    found: list[Content] = []
    for position, token in enumerate(tokens):
        context = hash((context, token))
        found.append((token, position, context))
    return found


class FakeBackend:
    """Writes and checks contents instead of keys and values."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.slots: list[Content | None] = [None] * (kv.num_blocks * kv.block_size)

    def block(self, block: int) -> list[Content | None]:
        size = self.kv.block_size
        return self.slots[block * size : (block + 1) * size]

    @property
    def block_bytes(self) -> int:
        return self.kv.block_size * 32

    def read_blocks(self, blocks: np.ndarray, out: np.ndarray) -> None:
        """As the engine's back ends do: each slot is four int64, the last one 1 if written."""
        for row, block in zip(out, blocks.tolist(), strict=True):
            slots = [(0, 0, 0, 0) if s is None else (*s, 1) for s in self.block(block)]
            row[:] = np.array(slots, np.int64).reshape(-1).view(np.uint8)

    def write_blocks(self, blocks: np.ndarray, data: np.ndarray) -> None:
        size = self.kv.block_size
        for row, block in zip(data, blocks.tolist(), strict=True):
            assert self.kv.pool.references(block) == 1 and block not in self.kv.index
            slots = row.view(np.int64).reshape(size, 4).tolist()
            self.slots[block * size : (block + 1) * size] = [
                (token, position, context) if written else None
                for token, position, context, written in slots
            ]

    def run(self, step: ScheduledStep) -> None:
        self._check_shape(step)
        self._copy(step)
        written: set[int] = set()
        expected = [contents(e.sequence.request.namespace, e.sequence.tokens) for e in step.entries]
        plan, size = step.plan, self.kv.block_size
        for number, entry in enumerate(step.entries):
            first = int(plan.row_starts[number])
            for row in range(first, first + entry.count):
                slot, position = int(plan.slots[row]), entry.start + row - first
                block = int(plan.block_tables[number, position // size])
                assert plan.positions[row] == position
                assert plan.tokens[row] == entry.sequence.tokens[position]
                assert slot == block * size + position % size
                assert slot not in written, "two rows write one slot"
                if not entry.sequence.finished:  # it may have ended since `schedule`
                    assert self.kv.pool.references(block) == 1, "others hold this block"
                    assert block not in self.kv.index, "a stored block is written"
                written.add(slot)
                self.slots[slot] = expected[number][position]
        for number, entry in enumerate(step.entries):
            table = plan.block_tables[number].tolist()
            for position in range(entry.start + entry.count):
                slot = table[position // size] * size + position % size
                assert self.slots[slot] == expected[number][position], (
                    f"{entry.sequence.id} reads a foreign position {position}"
                )

    def _copy(self, step: ScheduledStep) -> None:
        size = self.kv.block_size
        before = list(self.slots)
        pairs = step.plan.copies.tolist()
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets), "a block is copied over twice"
        for source, target in pairs:
            self.slots[target * size : (target + 1) * size] = self.block(source)
        for source, target in pairs:  # reading all sources first gives the same
            assert self.block(target) == before[source * size : (source + 1) * size]

    def _check_shape(self, step: ScheduledStep) -> None:
        plan, entries = step.plan, step.entries
        starts = [0, *itertools.accumulate(entry.count for entry in entries)]
        assert entries and all(entry.count > 0 for entry in entries)
        assert len({entry.sequence for entry in entries}) == len(entries)
        assert plan.row_starts.tolist() == starts
        assert plan.contexts.tolist() == [entry.start + entry.count for entry in entries]
        assert plan.rows == starts[-1] == step.prefill_tokens + step.decode_tokens
        for array in (plan.tokens, plan.positions, plan.slots, plan.row_starts, plan.contexts,
                      plan.block_tables, plan.logit_rows, plan.copies):  # fmt: skip
            assert array.dtype == "int32" and array.flags.c_contiguous
        rows: list[int] = []
        for entry, end in zip(entries, starts[1:], strict=True):
            assert entry.samples == (entry.start + entry.count == entry.sequence.total)
            scored = entry.sequence.request.params.prompt_logprobs is not None
            scored = scored and entry.sequence.output_length == 0
            wanted = entry.count if scored else int(entry.samples)
            assert entry.logits == slice(len(rows), len(rows) + wanted)
            rows += range(end - wanted, end)
        assert plan.logit_rows.tolist() == rows


@dataclass
class FakeEngine:
    """Does with a scheduler what the engine does, over a `FakeBackend`.

    The next token is a function of the sequence's content and index, so a sequence's output
    is the same however it is scheduled.

    Attributes:
        live: unfinished sequences by request.
        done: every sequence that ended, in order.
        failed: ids of requests that outgrew the cache.
    """

    config: EngineConfig
    kv: KVCacheManager
    chunking: Chunking | None = None
    capacity: Capacity | None = None
    tiers: Callable[[FakeBackend, VirtualClock], KVTiers] | None = None
    vocabulary: int = 3
    live: dict[Request, list[Sequence]] = field(default_factory=dict)
    done: list[Sequence] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.backend = FakeBackend(self.kv)
        self.scheduler = Scheduler(
            self.config, self.kv, self.clock, chunking=self.chunking, capacity=self.capacity,
            tiers=self.tiers(self.backend, self.clock) if self.tiers else None,
        )  # fmt: skip
        self._ids = itertools.count()

    def add(
        self, prompt: list[int], max_tokens: int = 4, *, n: int = 1, salt: str = "",
        prompt_logprobs: int | None = None, priority: int = 0, slo: SloClass = STANDARD,
        adapter: str = "", retention: Retention | None = None,
    ) -> Sequence:  # fmt: skip
        params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        request = Request(
            f"r{next(self._ids)}", list(prompt), params, self.clock.now(), priority,
            cache_salt=salt, slo=slo, adapter=adapter, retention=retention,
        )  # fmt: skip
        sequence = Sequence(request, 0, list(prompt))
        self.scheduler.add(sequence)
        self.live[request] = [sequence]
        return sequence

    def schedule(self) -> ScheduledStep | None:
        """The next step; a request that outgrows the cache is ended first."""
        while True:
            try:
                return self.scheduler.schedule()
            except CapacityError as error:
                assert error.request_id is not None
                self.failed.append(error.request_id)
                self.end(next(r for r in self.live if r.id == error.request_id))

    def step(self) -> ScheduledStep | None:
        step = self.schedule()
        if step is not None:
            self.complete(step)
        return step

    def complete(self, step: ScheduledStep) -> None:
        """Runs a scheduled step and takes what it sampled."""
        self.backend.run(step)
        self.scheduler.commit(step)
        seconds = 0.002 + 0.0005 * step.plan.rows + 1e-7 * float(step.plan.contexts.sum())
        self.clock.advance(seconds)
        self.scheduler.observe(step, seconds)
        self._tell(step)
        for entry in step.entries:
            sequence = entry.sequence
            if not entry.samples or sequence.finished:
                continue
            assert sequence.computed == sequence.total
            sampled = [sequence]
            if sequence.request.params.n > 1 and not sequence.forked:
                sampled += self._fork(sequence)
            for each in sampled:
                each.tokens.append(self._next(each))
                if each.output_length >= (each.request.params.max_tokens or 0):
                    self.end_one(each, FinishReason.LENGTH)

    def _next(self, sequence: Sequence) -> int:
        context = contents(sequence.request.namespace, sequence.tokens)[-1][2]
        return hash((context, sequence.index)) % self.vocabulary

    def _tell(self, step: ScheduledStep) -> None:
        """As the engine does, tells the scheduler what is sampled; but not always."""
        sampling = [sequence for sequence, _ in step.sampling()]
        assert sampling == [entry.sequence for entry in step.entries if entry.samples]
        forks = any(s.request.params.n > 1 and not s.forked for s in sampling)
        if not forks and len(self.done) % 3:
            self.scheduler.sampled(step, [self._next(sequence) for sequence in sampling])

    def _fork(self, parent: Sequence) -> list[Sequence]:
        parent.forked = True
        children = [
            Sequence(parent.request, index, list(parent.tokens), forked=True)
            for index in range(1, parent.request.params.n)
        ]
        for child in children:
            self.scheduler.fork(parent, child)
            assert child.computed == parent.computed
            self.live[parent.request].append(child)
        return children

    def end(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        for sequence in list(self.live[request]):
            self.end_one(sequence, reason)

    def end_one(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        assert sequence.status is SequenceStatus.FINISHED and sequence.finish_reason is reason
        assert not self.kv.block_table(sequence)
        self.done.append(sequence)
        self.live[sequence.request].remove(sequence)
        if not self.live[sequence.request]:
            del self.live[sequence.request]

    def drain(self, limit: int = 10_000) -> int:
        """Steps until there is no work; returns how many it took."""
        steps = 0
        while self.scheduler.has_work():
            assert steps < limit, "no end in sight"
            if self.step() is None:
                assert not self.scheduler.has_work(), "there is work, and nothing runs"
            steps += 1
        return steps


def make_engine(
    num_blocks: int = 64, block_size: int = 4, *, max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64, prefix_cache: bool = True,
    index: str = "hash", kv: KVCacheManager | None = None,
    chunking: Chunking | str | None = None, capacity: Capacity | str | None = None,
    **options: Any,
) -> FakeEngine:  # fmt: skip
    """An engine over `kv`, or over a new cache of that size; policies by name, or as objects."""
    if kv is None:
        made = make_index(index, block_size) if prefix_cache else NoIndex()
        kv = KVCacheManager(num_blocks, block_size, index=made)
    for name, value in (("chunking", chunking), ("capacity", capacity)):
        if isinstance(value, str):
            options[name] = value
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **options
    )
    return FakeEngine(
        config,
        kv,
        None if isinstance(chunking, str) else chunking,
        None if isinstance(capacity, str) else capacity,
    )


def live_tokens(kv: KVCacheManager) -> int:
    """Slots of held blocks in which a running sequence has KV, counted one by one."""
    size = kv.block_size
    return len(
        {
            (table.blocks[position // size], position % size)
            for sequence, table in kv._tables.items()
            for position in range(sequence.computed)
        }
    )
