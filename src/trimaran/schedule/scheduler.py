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
in any R consecutive steps (ceil(R / budget) where all decode). Where the chunking puts prompts
first, whoever was passed over for them goes first in the next step, so that is 2·R. The first
admitted is never preempted for another, so it ends; how long those that wait may be overtaken,
each order states.

A sequence whose prompt still arrives is open: what is known of it is computed like anything
else. With nothing to compute it keeps its seat and its blocks only until somebody needs them:
then it is parked, before anyone is preempted, and added again when more of it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt

from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import Match
from trimaran.cache.tiers import KVTiers
from trimaran.core.clock import Clock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError
from trimaran.core.request import FinishReason, Sequence, SequenceStatus
from trimaran.schedule.capacity import Capacity, make_capacity
from trimaran.schedule.chunking import Chunking, make_chunking
from trimaran.schedule.cost_model import StepCostModel, StepLoad
from trimaran.schedule.loading import Loading
from trimaran.schedule.order import Order, make_order
from trimaran.schedule.output_length import OutputLengths
from trimaran.schedule.plan_builder import PlanBuilder, reads_all_rows
from trimaran.schedule.running import Places, Running, packed
from trimaran.schedule.selection import NOBODY, Selection
from trimaran.schedule.step import ScheduledSequence, ScheduledStep

__all__ = ["ScheduledSequence", "ScheduledStep", "Scheduler"]


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
        max_model_len: int | None = None,
        tiers: KVTiers | None = None,
    ) -> None:
        """
        Args:
            order, chunking, capacity: policies to use instead of those that `config` names.
            max_model_len: tokens a sequence has at most; None: as many as the cache holds.
            tiers: below the cache, if there are any.
        """
        self.kv = kv
        self._clock = clock
        self._seats = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        longest = max_model_len or kv.num_blocks * kv.block_size
        self.cost = StepCostModel()
        self.lengths = OutputLengths()
        self._order = order or make_order(config.order, self._hit, self.cost, self.lengths, longest)
        self._chunking = chunking or make_chunking(
            config.chunking, config.chunk_size, self._budget, self._seats, self.cost
        )
        self._capacity = capacity or make_capacity(
            config.capacity, kv.num_blocks, kv.block_size, longest
        )
        self.loading: Loading | None = None
        if tiers is not None:
            self.loading = Loading(kv, tiers, clock, self.cost, self._capacity)
        self._running = Running()
        self._turn: Sequence | None = None  # who of them begins the next step, if not the first
        self._reading: set[Sequence] = set()  # who may need every row of its prompt
        self._numbers: Places = np.arange(16, dtype=np.intp)
        self._observed = 0
        self._joined = 0  # how many were admitted in the last step
        self._kept: dict[Sequence, int] = {}  # seats kept free for forks of a sequence
        self._preempted: list[Sequence] = []  # not yet reported in a step
        self._open: dict[Sequence, None] = {}  # may be idle; those that were closed fall out
        self._builder = PlanBuilder(kv)

    # ------------------------------------------------------------------ requests

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence into the waiting ones: a new one, or one that was parked.

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
        if sequence.open:
            self._open[sequence] = None
        sequence.status = SequenceStatus.WAITING
        self._order.push(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child`, with the same tokens as the running `parent`, go on from the parent's
        computed tokens, sharing its blocks. Takes one of the seats kept for the request."""
        kept = self._kept.get(parent, 0)
        if parent.status is not SequenceStatus.RUNNING or not kept:
            raise AssertionError(f"{parent.id} has no seat for {child.id}")
        self._kept[parent] = kept - 1
        self.kv.fork(parent, child)
        child.computed = parent.computed
        child.status = SequenceStatus.RUNNING
        number = parent.request.params.n - kept
        self._running.add_fork(parent, child, self.kv.row(child), number)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state and frees what it holds; the first reason stays."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        ran = sequence.status is SequenceStatus.RUNNING
        if ran:
            self._stop(sequence, sound=reason is not FinishReason.ERROR)
        if self.loading is not None:
            self.loading.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if not ran:
            self._order.remove(sequence)
        if sequence.output_length:
            self.lengths.observe(sequence.output_length, reason is FinishReason.STOP)

    def park(self, sequence: Sequence) -> None:
        """Takes all that an open sequence holds, wherever it is; `add` brings it back."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        else:
            self._order.remove(sequence)
        if self.loading is not None:
            self.loading.forget(sequence)
        sequence.status = SequenceStatus.PARKED
        sequence.computed = 0

    # ------------------------------------------------------------------ steps

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where nothing can run: there is no work, or all that there
        is waits for a lower tier.

        Raises:
            CapacityError: one sequence has outgrown the cache (its `request_id` says which);
                once that one is finished, scheduling goes on.
        """
        now = self._clock.now()
        self.kv.at(now)
        self._end_loading()
        running, budget = self._running, self._budget
        version, owed = running.version, self._turn is not None
        opened = self._chunking.opens(len(running), self._joined)
        chosen, preempted = self._serve_running()
        while preempted and not len(chosen):  # whoever had the budget lost its blocks
            chosen, preempted = self._serve_running()
        first = self._chunking.prompts_first and not owed
        left = budget if first else budget - chosen.tokens()
        admitted = self._admit(left, first or not len(chosen)) if opened else NOBODY
        self._joined = len(admitted)
        if first and admitted.sequences:
            chosen = self._fit(chosen, budget - admitted.tokens())
        chosen = chosen.then(admitted)
        if not len(chosen):
            self._start_loads()
            return None
        together = chosen.decodes and len(chosen) == len(running)
        step = self._builder.build(chosen, running.lasts() if together else None)
        step.admitted = admitted.sequences
        step.preempted = [sequence for sequence in self._preempted if not sequence.finished]
        self._preempted.clear()
        step.time = now
        step.version = version if version == running.version else -1
        return step

    def commit(self, step: ScheduledStep) -> None:
        """The back end has run `step`: its tokens are computed, their full blocks indexed.
        Sequences that have left meanwhile are passed over."""
        chosen, size = step.chosen, self.kv.block_size
        ends = step.plan.contexts
        full = ends // size > chosen.starts // size
        if step.version != self._running.version:
            stays = self._still_there(chosen)
            chosen, ends, full = chosen.keep(stays), ends[stays], full[stays]
            chosen.places = np.array([self._running.place(s) for s in chosen.sequences], np.intp)
        self._running.advance(chosen.places, ends)
        sequences, computed = chosen.sequences, ends.tolist()
        for sequence, end in zip(sequences, computed, strict=True):
            sequence.computed = end
        for place in full.nonzero()[0].tolist():
            self.kv.commit(sequences[place], computed[place])
        self._start_loads()

    def lost_with(self, step: ScheduledStep) -> list[Sequence]:
        """Who can't go on when `step` has failed: those in it, and of others that run those
        into whose blocks it was to copy."""
        lost = dict.fromkeys(entry.sequence for entry in step.entries)
        copied = set(step.plan.copies[:, 1].tolist())
        if copied:
            for sequence in self._running.sequences:
                if not copied.isdisjoint(self.kv.block_table(sequence)):
                    lost[sequence] = None
        return list(lost)

    def sampled(self, step: ScheduledStep, tokens: list[int]) -> None:
        """May be called once `step` is committed, before the tokens that were sampled for
        `step.sampling()` are appended: spares the next step from looking for them."""
        if step.version == self._running.version and len(tokens) == len(self._running):
            chosen = step.chosen
            places = chosen.places
            if not chosen.decodes:
                places = places[chosen.counts == chosen.wants]
            if len(places) == len(tokens):
                self._running.sampled(places, packed(tokens, len(tokens)))

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """Running `step` took so long, on whatever clock: the cost model learns from it. Of
        steps in which all decode, which are many and alike, only some are looked at."""
        self._observed += 1
        if not step.chosen.decodes or self.cost.observations < 64 or self._observed % 8 == 0:
            self.cost.observe(StepLoad.of(step.chosen), seconds)

    # ------------------------------------------------------------------ state

    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return len(self._running) > 0 or self.num_waiting > 0

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

    def live_tokens(self) -> int:
        """Tokens whose KV lies in held blocks; shared ones count once."""
        return self.kv.live_tokens(self._running.rows, self._running.computed)

    def running(self) -> Iterator[Sequence]:
        """Sequences that hold blocks, in order of admission."""
        return iter(self._running.sequences)

    def waiting(self) -> Iterator[Sequence]:
        """Sequences that wait, the next one first; before them those that are loading."""
        return chain(self.loading or (), self._order)

    # ------------------------------------------------------------------ parts of a step

    def _serve_running(self) -> tuple[Selection, bool]:
        """Those that run and get something, with blocks for it; and whether that took a
        preemption. The budget of those preempted is not given to others in this step."""
        running, chunking = self._running, self._chunking
        wants, starts = running.wants(), running.computed.copy()
        chunking.begin(starts, wants, running.targets)
        number, turn, self._turn = len(wants), self._turn, None
        if not number:
            return NOBODY, False
        places = self._places(number)
        decodes = turn is None and number <= self._budget and bool((wants == 1).all())
        if decodes and not self._someone_reads_all():
            chosen = Selection(
                running.sequences.copy(), places, running.rows.copy(), starts, wants, wants, True
            )
        else:
            if turn is not None:
                places = np.roll(places, -running.place(turn))
            starts, wants = starts[places], wants[places]
            counts = chunking.share(starts, wants, self._budget)
            sequences = [running.sequences[place] for place in places.tolist()]
            chosen = Selection(sequences, places, running.rows[places], starts, wants, counts)
            if not counts.all():
                passed = (wants > 0) & (counts == 0)
                self._turn = sequences[int(passed.argmax())] if passed.any() else None
                chosen = chosen.keep(counts > 0)
        preempted = self._find_blocks(chosen)
        if preempted:
            status = SequenceStatus.RUNNING
            chosen = chosen.keep(np.array([s.status is status for s in chosen.sequences], bool))
        return chosen, preempted

    def _places(self, number: int) -> Places:
        """0 .. number - 1, not to be written to."""
        if number > len(self._numbers):
            self._numbers = np.arange(2 * number, dtype=np.intp)
        return self._numbers[:number]

    def _someone_reads_all(self) -> bool:
        """Whether something is made of every row of the prompt of one of those that run."""
        if self._reading:
            self._reading = {s for s in self._reading if s in self._running and reads_all_rows(s)}
        return bool(self._reading)

    def _fit(self, chosen: Selection, budget: int) -> Selection:
        """The first of those that run, as far as `budget` goes; the next ones have a turn."""
        fits = np.cumsum(chosen.counts) <= budget
        if fits.all():
            return chosen
        self._turn = chosen.sequences[int(fits.argmin())]
        return chosen.keep(fits)

    def _still_there(self, chosen: Selection) -> npt.NDArray[np.bool_]:
        """[S] who still runs, and is as far as it was when the step was made."""
        running = SequenceStatus.RUNNING
        flags = [
            sequence.status is running and sequence.computed == start
            for sequence, start in zip(chosen.sequences, chosen.starts.tolist(), strict=True)
        ]
        return np.array(flags, bool)

    def _find_blocks(self, chosen: Selection) -> bool:
        """Finds blocks for the tokens of each; returns whether anyone was preempted."""
        before = len(self._preempted)
        ends = chosen.ends()
        short = self.kv.short(chosen.rows, ends)
        if not len(short):
            return False
        if chosen.decodes and self.kv.allocate_next(chosen.rows[short], chosen.starts[short]):
            return False
        for place in short.tolist():
            sequence, end = chosen.sequences[place], int(ends[place])
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            while not self.kv.allocate(sequence, end):
                if self._park_one():
                    continue
                self._check_fits(sequence, end)
                victim = self._capacity.victim(self._running.sequences, sequence)
                self._preempt(victim)
                if victim is sequence:
                    break
        return len(self._preempted) > before

    def _admit(self, budget: int, alone: bool) -> Selection:
        """Admits who waits while seats, blocks and budget last.

        Args:
            alone: nobody who runs is to be served before them.
        """
        parts: list[tuple[Sequence, int, int, int, int, int]] = []
        free = self._free_seats()
        if budget <= 0 or (free <= 0 and not self._open) or not len(self._order):
            return NOBODY
        self._order.begin()
        while budget > 0 and (sequence := self._order.peek()) is not None:
            seats = 1 if sequence.forked else sequence.request.params.n
            if seats > free or not self._capacity.admits(sequence):
                if self._park_one():
                    free = self._free_seats()
                    continue
                break
            whole = reads_all_rows(sequence)
            prefix = self.kv.no_match(sequence) if whole else self.kv.match(sequence)
            if not whole and self._begin_loading(sequence, prefix):
                free -= 1
                continue
            want = sequence.total - prefix.tokens
            count = self._chunking.admit(prefix.tokens, want, budget, alone and not parts)
            if count == 0:
                break
            if not self.kv.admit(sequence, prefix, sequence.total, count):
                if self._park_one():
                    free = self._free_seats()
                    continue
                if not len(self._running):  # all blocks are to be had, and still too few
                    self._check_fits(sequence, sequence.total)
                break
            row = self._start(sequence, prefix.tokens, seats - 1)
            parts.append((sequence, len(self._running) - 1, row, prefix.tokens, want, count))
            budget, free = budget - count, free - seats
        return Selection.of(parts) if parts else NOBODY

    def _begin_loading(self, sequence: Sequence, prefix: Match) -> bool:
        """Whether the sequence waits for a lower tier from now on."""
        if self.loading is None:
            return False
        if not self.loading.begin(sequence, prefix, len(self._running) + 1):
            return False
        self._order.remove(sequence)
        sequence.status = SequenceStatus.LOADING
        return True

    def _start_loads(self) -> None:
        """Loads may write now: the copies of the step that was being made have been done."""
        if self.loading is not None:
            self.loading.tiers.start()

    def _end_loading(self) -> None:
        """Those whose load has ended wait at the head, in the order in which they came."""
        if self.loading is not None:
            self._start_loads()  # of a step that failed
            for sequence in reversed(self.loading.ended()):
                sequence.status = SequenceStatus.WAITING
                self._order.requeue(sequence)

    def _free_seats(self) -> int:
        return self._seats - len(self._running) - sum(self._kept.values()) - self.num_loading

    def _start(self, sequence: Sequence, computed: int, kept: int) -> int:
        """Moves a sequence from those that wait to those that run; its table's row."""
        self._order.remove(sequence)
        if self.loading is not None:
            self.loading.forget(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.computed = computed
        if sequence.preemptions == 0:
            sequence.cached = computed
        if kept:
            self._kept[sequence] = kept
        if reads_all_rows(sequence):
            self._reading.add(sequence)
        row = self.kv.row(sequence)
        self._running.add(sequence, row, kept)
        self._capacity.started(sequence)
        return row

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

    def _park_one(self) -> bool:
        """Takes seat and blocks of an open sequence that has nothing to compute; whether there
        was one. What it had computed stays in the prefix index until it is evicted."""
        for sequence in list(self._open):
            if not sequence.open or sequence.finished:
                del self._open[sequence]
            elif sequence.status is SequenceStatus.RUNNING and sequence.idle:
                self.park(sequence)
                return True
        return False

    def _stop(self, sequence: Sequence, sound: bool = True) -> None:
        """Takes a sequence out of those that run; its turn goes to the one after it."""
        at = self._running.remove(sequence)
        if self._turn is sequence:
            behind = self._running.sequences[at : at + 1]
            self._turn = behind[0] if behind else None
        self._capacity.stopped(sequence, self._kept.pop(sequence, 0))
        self.kv.release(sequence, sound=sound)

    def _hit(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that the prefix cache has now and that spare it
        computing them."""
        return 0 if reads_all_rows(sequence) else self.kv.match(sequence).tokens

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
