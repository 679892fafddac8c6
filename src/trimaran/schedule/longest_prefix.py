"""The order that follows what the prefix cache has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from trimaran.core.namespace import Namespace
from trimaran.core.request import Sequence, SequenceStatus

_Group = tuple[Namespace, int, tuple[int, ...]]


class LongestPrefix:
    """The longest cached prefix first, so that it is used before it is evicted (SGLang's
    `lpm`; Zheng and others: Efficient execution of structured language model programs, 2024).

    Formula: of the `WINDOW` that have waited longest, the one of which most tokens are cached;
    equal ones by arrival, the preempted before all. In-batch rule: of those whose next
    `SHARED` tokens after the cached ones are equal, one is admitted and the others wait until
    it has computed them, and then find them in the cache.
    Cost: at most `LOOKUPS` look-ups of prefixes a step, those of longest ago first, so what a
    queue longer than that is ordered by is a few steps old; O(WINDOW) for each admission.
    Starvation: the one that has waited longest is next once `BYPASSES` others went before it.
    So one that comes when m others wait is admitted after at most (m + 1)·(BYPASSES + 1)
    admissions.
    Faults: an answer may come later because others share a prefix; what is cached for short is
    preferred over what is short.
    """

    WINDOW = 64
    LOOKUPS = 16
    BYPASSES = 64
    SHARED = 32

    def __init__(self, hit: Callable[[Sequence], int]) -> None:
        self._hit = hit
        self._back: OrderedDict[Sequence, None] = OrderedDict()  # the preempted
        self._queue: OrderedDict[Sequence, None] = OrderedDict()  # by arrival
        self._hits: OrderedDict[Sequence, int] = OrderedDict()  # looked up longest ago first
        self._computing: dict[_Group, Sequence] = {}
        self._bypassed = 0  # admissions since the first of the queue is the first
        self._next: Sequence | None = None

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence] = None

    def requeue(self, sequence: Sequence) -> None:
        self._back[sequence] = None
        self._back.move_to_end(sequence, last=False)

    def begin(self) -> None:
        self._next = None
        window = list(islice(self._queue, self.WINDOW))
        new = [sequence for sequence in window if sequence not in self._hits]
        for sequence in [*new, *islice(self._hits, self.LOOKUPS)][: self.LOOKUPS]:
            self._hits[sequence] = self._hit(sequence)
            self._hits.move_to_end(sequence)
        self._computing = {
            group: leader for group, leader in self._computing.items() if _still(group, leader)
        }

    def peek(self) -> Sequence | None:
        if self._back:
            return next(iter(self._back))
        if self._next is None and self._queue:
            self._next = self._choose()
        return self._next

    def remove(self, sequence: Sequence) -> None:
        self._next = None
        if sequence in self._back:
            del self._back[sequence]
            return
        if sequence not in self._queue:
            return
        first = next(iter(self._queue))
        del self._queue[sequence]
        hit = self._hits.pop(sequence, 0)
        if sequence is first:
            self._bypassed = 0
        elif not sequence.finished:
            self._bypassed += 1
        if not sequence.finished:
            self._computing.setdefault(self._group(sequence, hit), sequence)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._back
        known = sorted(self._hits, key=lambda sequence: -self._hits[sequence])
        yield from known
        yield from (sequence for sequence in self._queue if sequence not in self._hits)

    def __len__(self) -> int:
        return len(self._back) + len(self._queue)

    def _choose(self) -> Sequence | None:
        first = next(iter(self._queue))
        if self._bypassed >= self.BYPASSES:
            return first
        chosen, longest = None, -1
        for sequence in islice(self._queue, self.WINDOW):
            hit = self._hits.get(sequence, 0)
            if hit > longest and self._group(sequence, hit) not in self._computing:
                chosen, longest = sequence, hit
        return chosen

    def _group(self, sequence: Sequence, hit: int) -> _Group:
        """Of sequences of one group, who is admitted computes what the others need; a tail
        shorter than `SHARED` makes a group of its own."""
        own = sequence.tokens[hit : hit + self.SHARED]
        if len(own) < self.SHARED:
            return Namespace(sequence.id), hit, ()
        return sequence.request.namespace, hit, tuple(own)


def _still(group: _Group, leader: Sequence) -> bool:
    """Whether `leader` is still about to compute the tokens of its group."""
    _, hit, tokens = group
    running = leader.status is SequenceStatus.RUNNING
    return running and bool(tokens) and leader.computed < hit + len(tokens)
