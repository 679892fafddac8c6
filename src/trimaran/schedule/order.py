"""Which waiting sequence is admitted next."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from trimaran.core.errors import ConfigError
from trimaran.core.request import Sequence
from trimaran.schedule.cost_model import StepCostModel
from trimaran.schedule.longest_prefix import LongestPrefix
from trimaran.schedule.output_length import OutputLengths

Key = Callable[[Sequence], float]


class Order(Protocol):
    """The queue of the waiting sequences."""

    def push(self, sequence: Sequence) -> None:
        """A new sequence."""
        ...

    def requeue(self, sequence: Sequence) -> None:
        """A preempted sequence; among several of a step the last admitted comes first."""
        ...

    def begin(self) -> None:
        """A new step may admit some of them now."""
        ...

    def peek(self) -> Sequence | None:
        """The next one; None where nobody waits, or nobody is to be admitted now."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """It was admitted, or it ended; one that isn't here is ignored."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, the next one first as far as that is known."""
        ...

    def __len__(self) -> int: ...


class Fcfs:
    """First come, first served.

    Formula: by arrival; a preempted sequence goes before everyone who waits.
    Cost: O(1) an operation.
    Faults: the head blocks those behind it even where they would fit, so a long prompt
    delays short ones; knows nothing of priorities, prefixes or deadlines. In return nobody
    is ever overtaken, so nobody starves.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[Sequence, None] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence] = None

    def requeue(self, sequence: Sequence) -> None:
        self._queue[sequence] = None
        self._queue.move_to_end(sequence, last=False)

    def begin(self) -> None:
        pass

    def peek(self) -> Sequence | None:
        return next(iter(self._queue), None)

    def remove(self, sequence: Sequence) -> None:
        self._queue.pop(sequence, None)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)


class _Ranked:
    """A queue by a rank that is fixed when a sequence comes, the lowest first; equal ones by
    arrival. The preempted go before all others. O(log W) an operation."""

    def __init__(self) -> None:
        self._back = Fcfs()  # the preempted
        self._heap: list[tuple[float, int, Sequence]] = []
        self._waiting: set[Sequence] = set()  # others in the heap have left
        self._count = itertools.count()

    def rank(self, sequence: Sequence) -> float:
        raise NotImplementedError

    def push(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        heapq.heappush(self._heap, (self.rank(sequence), next(self._count), sequence))

    def requeue(self, sequence: Sequence) -> None:
        self._back.requeue(sequence)

    def begin(self) -> None:
        pass

    def peek(self) -> Sequence | None:
        first = self._back.peek()
        if first is not None:
            return first
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        self._back.remove(sequence)
        self._waiting.discard(sequence)
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        ranked = (entry[2] for entry in sorted(self._heap))
        return itertools.chain(self._back, (each for each in ranked if each in self._waiting))

    def __len__(self) -> int:
        return len(self._back) + len(self._waiting)


class Priority(_Ranked):
    """The lowest `Request.priority` first; waiting makes up for it.

    Formula: rank = priority + arrival / 10 s; the lowest first. So a request that waits gains
    a level every ten seconds on those that come later.
    Cost: O(log W) an operation, W waiting.
    Starvation: of the requests that come later, only those go before one of priority p that
    have a priority q < p and come within 10·(p - q) seconds of it.
    Faults: whoever runs goes on, whatever comes; prefixes and lengths play no part.
    """

    SECONDS_A_LEVEL = 10.0

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        return request.priority + request.arrival / self.SECONDS_A_LEVEL


class WeightedShortest(_Ranked):
    """The shortest service for its weight first: Smith's rule (Various optimizers for
    single-stage production, 1956), by which a single server minimises Σ weight · completion.

    Formula: rank = p / w + arrival / 8, the lowest first. w is the weight of the request's SLO
    class; p the seconds that the cost model predicts for the prompt, but for what the prefix
    cache has of it now, and for n outputs of the length to be expected below `max_tokens`.
    Cost: O(log W) an operation, and a look-up in the prefix cache for each request that comes.
    Starvation: of the requests that come later, only those go before one of predicted p / w
    that come within 8·p/w seconds of it: whoever takes ten times as long may be overtaken for
    ten times as long.
    Faults: p is a guess; a bad one costs order, and nothing else. It is made once, so a prefix
    that is cached or evicted later isn't seen. The rule is optimal for one server that serves
    one after the other; a batch serves many at once, and preempts nobody for a shorter one.
    """

    STRETCH = 8.0

    def __init__(
        self,
        hit: Callable[[Sequence], int],
        cost: StepCostModel,
        lengths: OutputLengths,
        max_model_len: int,
    ) -> None:
        super().__init__()
        self._hit = hit
        self._cost = cost
        self._lengths = lengths
        self._longest = max_model_len

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        return self.service(sequence) / request.slo.weight + request.arrival / self.STRETCH

    def service(self, sequence: Sequence) -> float:
        """Predicted seconds of it."""
        params, length = sequence.request.params, sequence.prompt_length
        limit = max(1, self._longest - length)
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        start = self._hit(sequence)
        output = self._lengths.expected(limit)
        prefill = self._cost.prefill_seconds(start, length - start)
        return prefill + params.n * self._cost.decode_seconds(length, output)


def make_order(
    name: str,
    hit: Callable[[Sequence], int],
    cost: StepCostModel,
    lengths: OutputLengths,
    max_model_len: int,
) -> Order:
    """The order of that name (`EngineConfig.order`).

    Args:
        hit: how many of a sequence's tokens the prefix cache has now.

    Raises:
        ConfigError: there is none.
    """
    if name == "fcfs":
        return Fcfs()
    if name == "priority":
        return Priority()
    if name == "longest-prefix":
        return LongestPrefix(hit)
    if name == "weighted-shortest":
        return WeightedShortest(hit, cost, lengths, max_model_len)
    raise ConfigError(
        f"order is '{name}'; give 'fcfs', 'priority', 'longest-prefix' or 'weighted-shortest'"
    )
