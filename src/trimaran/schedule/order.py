"""Which waiting sequence is admitted next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from trimaran.core.errors import ConfigError
from trimaran.core.request import Sequence


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
        """All of them, the next one first."""
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


def make_order(name: str) -> Order:
    """The order of that name (`EngineConfig.order`).

    Raises:
        ConfigError: there is none.
    """
    if name == "fcfs":
        return Fcfs()
    raise ConfigError(f"order is '{name}'; give 'fcfs'")
