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
        live: tokens whose KV lies in the held blocks.
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
    live: int

    def fragmentation(self, block_size: int) -> float:
        """Share of the held blocks' places that hold no token's KV; 0 where none is held."""
        return 1 - self.live / (self.held * block_size) if self.held else 0.0


class StepLog:
    """The last `KEPT` steps. One thread writes; any may read a copy."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=KEPT)

    def add(self, record: StepRecord) -> None:
        """A step has run."""
        self._records.append(record)

    @property
    def last(self) -> StepRecord | None:
        """The last step; None before the first."""
        return self._records[-1] if self._records else None

    def since(self, number: int) -> list[StepRecord]:
        """The steps after that number, oldest first."""
        return [record for record in list(self._records) if record.number > number]
