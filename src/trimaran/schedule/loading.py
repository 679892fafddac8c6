"""Who waits for blocks from a lower tier, and whether that is worth it.

    waiting ──its prefix goes on in a lower tier──▶ loading ──load ended, or given up──▶ waiting
                                                       │                         (at the head)
                                                       └──aborted

A sequence that waits so holds nothing: the load holds the blocks, and what it brings is
indexed, so the sequence finds it as a longer prefix when it is admitted, and computes the
rest. Other sequences are served meanwhile. In a time of waiting each has a load begun for it
at most once, joins others' at most twice, and waits for each no longer than computing would
take, or half a second: nobody waits for a tier for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import Match
from trimaran.cache.tier_work import Load
from trimaran.cache.tiers import KVTiers
from trimaran.core.clock import Clock
from trimaran.core.request import Sequence
from trimaran.schedule.capacity import Capacity
from trimaran.schedule.cost_model import StepCostModel

MIN_SECONDS = 0.5
"""How long one may wait for a load in any case: it is only looked at between steps."""

MAX_SECONDS = 10.0
"""Nobody waits longer for a load, however long computing may take."""

MAX_ROUNDS = 2
"""Loads that a sequence waits for, one after the other; after its own it asks for no other."""


@dataclass(slots=True, eq=False)
class _Wait:
    load: Load
    until: float


class Loading:
    """The decisions over a cache with tiers.

    Attributes:
        moved, recomputed: preemptions by how their blocks come back: from host memory, or by
            computing again.
        given_up: sequences that have stopped waiting for a load.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        tiers: KVTiers,
        clock: Clock,
        cost: StepCostModel,
        capacity: Capacity,
    ) -> None:
        self.moved = self.recomputed = self.given_up = 0
        self.tiers = tiers
        self._kv = kv
        self._clock = clock
        self._cost = cost
        self._capacity = capacity
        self._lent: dict[Load, int] = {}
        self._waits: dict[Sequence, _Wait] = {}  # in order of arrival here
        self._rounds: dict[Sequence, int] = {}  # since they began to wait

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waits)

    def begin(self, sequence: Sequence, match: Match, spared: int) -> bool:
        """Whether the sequence waits for a load from now on, instead of being admitted.

        Args:
            match: what the pool's index has of it.
            spared: blocks that a load must leave for those that run.
        """
        if self._rounds.get(sequence, 0) >= MAX_ROUNDS:
            return False
        kv, size = self._kv, self._kv.block_size
        start, limit = match.tokens // size, (sequence.total - 1) // size
        if start >= limit or kv.pool.available < kv.blocks_for(sequence.total) + spared:
            return False
        if match.tokens % size:  # the index can share a part of a block, a tier can't
            match = kv.match_up_to(sequence, start * size)
        found = self.tiers.find(match, sequence.tokens, limit)
        load, digests = found.under_way, found.digests
        self._rounds[sequence] = MAX_ROUNDS if load is None else self._rounds.get(sequence, 0) + 1
        tokens = size * len(digests if load is None else load.digests)
        computing = self._cost.prefill_seconds(start * size, tokens)
        held = start + len(digests)
        if digests and found.seconds < computing and self._capacity.lends(held):
            load = self.tiers.load(match, sequence.tokens, digests)
            if load is not None:
                self._lent[load] = held
                self._capacity.lent(held)
        if load is None:
            return False
        patience = min(MAX_SECONDS, max(MIN_SECONDS, computing, found.seconds))
        self._waits[sequence] = _Wait(load, self._clock.now() + patience)
        return True

    def ended(self) -> list[Sequence]:
        """Those who wait no more, the first that came first."""
        finished = set(self.tiers.take_finished())
        for load in finished:
            self._capacity.lent(-self._lent.pop(load))
        if not self._waits:
            return []
        now = self._clock.now()
        ended = []
        for sequence, wait in list(self._waits.items()):
            if wait.load not in finished and now < wait.until:
                continue
            del self._waits[sequence]
            ended.append(sequence)
            if wait.load not in finished:
                self.given_up += 1
                self._cancel_unwanted(wait.load)
        return ended

    def forget(self, sequence: Sequence) -> None:
        """It was admitted, or has ended."""
        self._rounds.pop(sequence, None)
        wait = self._waits.pop(sequence, None)
        if wait is not None:
            self._cancel_unwanted(wait.load)

    def preempted(self, sequence: Sequence) -> None:
        """Its blocks are about to be taken back: they are copied to host memory where that,
        and bringing them back, takes less time than computing them again."""
        blocks = self._kv.block_table(sequence)[: sequence.computed // self._kv.block_size]
        seconds = self.tiers.move_seconds(blocks) if blocks else None
        if seconds is not None and seconds < self._cost.prefill_seconds(0, sequence.computed):
            self.tiers.move(blocks)
            self.moved += 1
        else:
            self.recomputed += 1

    def _cancel_unwanted(self, load: Load) -> None:
        if all(wait.load is not load for wait in self._waits.values()):
            load.cancelled = True
