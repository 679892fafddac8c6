"""Who computes how many tokens in the next step.

There is no prefill phase and no decode phase: a sequence has `computed` and `total` tokens,
and a step hands out a budget of tokens not yet computed. A new prompt, the rest of a chunked
one, a prompt whose beginning the prefix cache supplied, recomputation after preemption and
the one token of a decode are all the same thing.

A step serves first those that run, in order of admission, then admits from those that wait
while seats, blocks and budget last. When blocks run out, the capacity policy names a victim
that gives its blocks back and waits again.

Nobody starves. With a budget below the number of running sequences the next step begins
with the first one that got nothing, so of R running sequences each is served at least once
in any R consecutive steps (ceil(R / budget) where all decode). The first admitted is never
preempted for another, so it ends; under first come, first served the next one is then first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import Match
from trimaran.cache.tiers import KVTiers
from trimaran.core.clock import Clock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError
from trimaran.core.request import FinishReason, Sequence, SequenceStatus
from trimaran.core.step_plan import StepPlan
from trimaran.schedule.capacity import Capacity, make_capacity
from trimaran.schedule.chunking import Chunking, FixedChunk
from trimaran.schedule.loading import Loading
from trimaran.schedule.order import Order, make_order
from trimaran.schedule.plan_builder import PlanBuilder, ScheduledSequence, scores_prompt
from trimaran.schedule.selection import Selection
from trimaran.schedule.step_seconds import MeasuredPrefill

__all__ = ["ScheduledSequence", "ScheduledStep", "Scheduler"]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step's decision.

    Attributes:
        entries: who is in it, in the order of the plan's rows.
        plan: what the back end executes.
        preempted: who lost its blocks since the last step was made, and has not ended.
        prefill_tokens: rows of sequences that had more than one token to compute.
        decode_tokens: rows of sequences that had just one.
        time: when it was made, seconds on the scheduler's clock.
    """

    entries: list[ScheduledSequence]
    plan: StepPlan
    preempted: list[Sequence] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    time: float = 0.0


class Scheduler:
    """Iteration-level scheduler over one KV cache; not thread-safe.

    For each step: `schedule`, run the plan, `commit`, append what was sampled to
    `Sequence.tokens`. `add` and `finish` may come at any time between these.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        clock: Clock,
        *,
        order: Order | None = None,
        chunking: Chunking | None = None,
        capacity: Capacity | None = None,
        tiers: KVTiers | None = None,
    ) -> None:
        self.kv = kv
        self._prefill = MeasuredPrefill()
        self.loading = None if tiers is None else Loading(kv, tiers, clock, self._prefill)
        self._clock = clock
        self._seats = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._order = make_order(config.order) if order is None else order
        self._chunking = FixedChunk(self._budget) if chunking is None else chunking
        self._capacity = make_capacity(config.capacity) if capacity is None else capacity
        self._running: list[Sequence] = []  # in order of admission
        self._turn: Sequence | None = None  # who of them begins the next step, if not the first
        self._kept: dict[Sequence, int] = {}  # seats kept free for forks of a sequence
        self._preempted: list[Sequence] = []  # not yet reported in a step
        self._builder = PlanBuilder(kv)

    # ------------------------------------------------------------------ requests

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence into the waiting ones.

        Raises:
            CapacityError: it could never be admitted.
        """
        if sequence.request.params.n > self._seats:
            raise _capacity_error(
                sequence,
                f"n is {sequence.request.params.n}, above max_num_seqs {self._seats};"
                " lower n or raise max_num_seqs",
            )
        self._check_fits(sequence, self._capacity.reserve(sequence))
        sequence.status = SequenceStatus.WAITING
        self._order.push(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child`, with the same tokens as the running `parent`, go on from the parent's
        computed tokens, sharing its blocks. Takes one of the seats kept for the request."""
        if parent.status is not SequenceStatus.RUNNING or not self._kept.get(parent):
            raise AssertionError(f"{parent.id} has no seat for {child.id}")
        self._kept[parent] -= 1
        self.kv.fork(parent, child)
        child.computed = parent.computed
        child.status = SequenceStatus.RUNNING
        self._running.insert(self._running.index(parent) + 1, child)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state and frees what it holds; the first reason stays."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        else:
            self._order.remove(sequence)
        if self.loading is not None:
            self.loading.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    # ------------------------------------------------------------------ steps

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where nothing can run: there is no work, or all that there
        is waits for a lower tier.

        Raises:
            CapacityError: one sequence has outgrown the cache (its `request_id` says which);
                once that one is finished, scheduling goes on.
        """
        self._end_loading()
        chosen, preempted = self._serve_running()
        while preempted and not chosen.sequences:  # whoever had the budget lost its blocks
            chosen, preempted = self._serve_running()
        self._admit(chosen)
        if not chosen.sequences:
            return None
        entries, plan = self._builder.build(chosen)
        victims = [sequence for sequence in self._preempted if not sequence.finished]
        self._preempted.clear()
        decodes = chosen.wants.count(1)
        return ScheduledStep(
            entries, plan, victims, plan.rows - decodes, decodes, self._clock.now()
        )

    def commit(self, step: ScheduledStep) -> None:
        """The back end has run `step`: its tokens are computed, their full blocks indexed.
        Sequences that have left meanwhile are passed over."""
        size = self.kv.block_size
        if self.loading is not None:
            self._prefill.observe(
                step.prefill_tokens, step.plan.rows, self._clock.now() - step.time
            )
        running = SequenceStatus.RUNNING
        for entry in step.entries:
            sequence, start = entry.sequence, entry.start
            if sequence.status is running and sequence.computed == start:
                sequence.computed = end = start + entry.count
                if end // size > start // size:
                    self.kv.commit(sequence, end)

    # ------------------------------------------------------------------ state

    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self._running) or self.num_waiting > 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._order) + self.num_loading

    @property
    def num_loading(self) -> int:
        """Those of the waiting that wait for blocks from a lower tier."""
        return 0 if self.loading is None else len(self.loading)

    def running(self) -> Iterator[Sequence]:
        """Sequences that hold blocks, in order of admission."""
        return iter(self._running)

    def waiting(self) -> Iterator[Sequence]:
        """Sequences that wait, the next one first; before them those that are loading."""
        return chain(self.loading or (), self._order)

    # ------------------------------------------------------------------ parts of a step

    def _serve_running(self) -> tuple[Selection, bool]:
        """Those that run and get something, with blocks for it; and whether that took a
        preemption. The budget of those preempted is not given to others in this step."""
        sequences = self._in_turn()
        starts = [sequence.computed for sequence in sequences]
        wants = [len(sequence.tokens) - sequence.computed for sequence in sequences]
        counts = self._chunking.share(wants, self._budget)
        chosen = Selection(sequences, starts, wants, counts)
        self._turn = None
        if not all(counts):
            left = zip(sequences, wants, counts, strict=True)
            self._turn = next((s for s, want, count in left if want and not count), None)
            chosen.keep([count > 0 for count in counts])
        preempted = self._find_blocks(chosen)
        if preempted:
            running = SequenceStatus.RUNNING
            chosen.keep([sequence.status is running for sequence in chosen.sequences])
        return chosen, preempted

    def _in_turn(self) -> list[Sequence]:
        """Those that run (a copy), beginning with the one whose turn it is."""
        if self._turn is None:
            return self._running.copy()
        at = self._running.index(self._turn)
        return self._running[at:] + self._running[:at]

    def _find_blocks(self, chosen: Selection) -> bool:
        """Finds blocks for the tokens of each; returns whether anyone was preempted."""
        before = len(self._preempted)
        for place in self.kv.short(chosen.sequences, chosen.ends()):
            sequence = chosen.sequences[place]
            end = sequence.computed + chosen.counts[place]
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            while not self.kv.allocate(sequence, end):
                self._check_fits(sequence, end)
                victim = self._capacity.victim(self._running, sequence)
                self._preempt(victim)
                if victim is sequence:
                    break
        return len(self._preempted) > before

    def _admit(self, chosen: Selection) -> None:
        """Admits who waits while seats, blocks and budget last."""
        budget = self._budget - sum(chosen.counts)
        free = self._seats - len(self._running) - sum(self._kept.values()) - self.num_loading
        while budget > 0 and (sequence := self._order.peek()) is not None:
            seats = 1 if sequence.forked else sequence.request.params.n
            if seats > free:
                break
            scores = scores_prompt(sequence)
            prefix = self.kv.no_match(sequence) if scores else self.kv.match(sequence)
            if not scores and self._begin_loading(sequence, prefix):
                free -= 1
                continue
            want = sequence.total - prefix.tokens
            (count,) = self._chunking.share([want], budget)
            if count == 0:
                break
            if not self.kv.admit(sequence, prefix, self._capacity.reserve(sequence)):
                if not self._running:  # all blocks are to be had, and still too few
                    self._check_fits(sequence, self._capacity.reserve(sequence))
                break
            self._start(sequence, prefix.tokens, seats - 1)
            chosen.append(sequence, prefix.tokens, want, count)
            budget, free = budget - count, free - seats

    def _begin_loading(self, sequence: Sequence, prefix: Match) -> bool:
        """Whether the sequence waits for a lower tier from now on."""
        if self.loading is None:
            return False
        if not self.loading.begin(sequence, prefix, len(self._running) + 1):
            return False
        self._order.remove(sequence)
        sequence.status = SequenceStatus.LOADING
        return True

    def _end_loading(self) -> None:
        """Those whose load has ended wait at the head, in the order in which they came."""
        if self.loading is not None:
            for sequence in reversed(self.loading.ended()):
                sequence.status = SequenceStatus.WAITING
                self._order.requeue(sequence)

    def _start(self, sequence: Sequence, computed: int, kept: int) -> None:
        """Moves a sequence from those that wait to those that run."""
        self._order.remove(sequence)
        if self.loading is not None:
            self.loading.forget(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.computed = computed
        if sequence.preemptions == 0:
            sequence.cached = computed
        if kept:
            self._kept[sequence] = kept
        self._running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes its blocks back; it computes again, after what the index still has and what a
        lower tier brings back."""
        if self.loading is not None:
            self.loading.preempted(sequence)
        self._stop(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self._order.requeue(sequence)
        self._preempted.append(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Takes a sequence out of those that run; its turn goes to the one after it."""
        at = self._running.index(sequence)
        del self._running[at]
        if self._turn is sequence:
            self._turn = self._running[at] if at < len(self._running) else None
        self._kept.pop(sequence, None)
        self.kv.release(sequence)

    def _check_fits(self, sequence: Sequence, tokens: int) -> None:
        if self.kv.blocks_for(tokens) > self.kv.num_blocks:
            raise _capacity_error(
                sequence,
                f"request '{sequence.request.id}' needs KV blocks for {tokens} tokens, and the"
                f" cache has {self.kv.num_blocks} of {self.kv.block_size} tokens; raise"
                " kv_cache_bytes or kv_memory_fraction, or lower max_model_len",
            )


def _capacity_error(sequence: Sequence, message: str) -> CapacityError:
    error = CapacityError(message)
    error.request_id = sequence.request.id
    return error
