"""The last steps of an engine, for those who watch it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT = 600


class StepRecord(NamedTuple):
    """One step.

    Attributes:
        number: of the step, since the start.
        begin: of the forward, seconds on the engine's clock.
        seconds: that the forward took.
        prefill_tokens: rows of prompts.
        decode_tokens: rows of sequences that generate.
        running: sequences that had a seat.
        waiting: sequences that had none.
        held: KV blocks in tables.
        cached: KV blocks that only the prefix index remembers.
    """

    number: int
    begin: float
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    held: int
    cached: int


class StepLog:
    """The last `KEPT` steps. One thread writes; any may read a copy."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=KEPT)

    def add(self, record: StepRecord) -> None:
        """A step has run."""
        self._records.append(record)

    def since(self, number: int) -> list[StepRecord]:
        """The steps after that number, oldest first."""
        return [record for record in list(self._records) if record.number > number]
