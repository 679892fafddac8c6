"""What the scheduler decided for one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trimaran.core.request import Sequence
from trimaran.core.step_plan import StepPlan
from trimaran.schedule.selection import Selection

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)  # not frozen: that would make it three times as slow to make
class ScheduledSequence:
    """One sequence's part in a step.

    Attributes:
        start: position of its first row.
        count: rows.
        samples: the last row is that of the last known token: a token is drawn from it (of a
            prompt that is pooled none is).
        logits: its rows in the array of logits: every row of a prompt whose tokens are to be
            scored, else the last row where `samples`, else none.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    logits: slice


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step's decision.

    Attributes:
        chosen: who is in it and with how much, in the order of the plan's rows.
        plan: what the back end executes.
        logit_ends: [S] where each one's rows in the array of logits end.
        wanted: [S] how many rows of logits each has.
        admitted: who runs since this step: the last of `chosen`.
        scoring: whether some rows of logits are there to score a prompt.
        preempted: who lost its blocks since the last step was made, and has not ended.
        prefill_tokens: rows of sequences that had more than one token to compute.
        decode_tokens: rows of sequences that had just one.
        time: when it was made, seconds on the scheduler's clock.
        version: of the running sequences' places when it was made.
    """

    chosen: Selection
    plan: StepPlan
    logit_ends: Int32
    wanted: Int32
    scoring: bool = False
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    time: float = 0.0
    version: int = -1
    _entries: list[ScheduledSequence] | None = None

    def sampling(self) -> Iterator[tuple[Sequence, int]]:
        """(sequence, its row of the logits) of each from whose last row a token is drawn."""
        chosen = self.chosen
        if chosen.decodes:
            return zip(chosen.sequences, range(len(chosen)), strict=True)
        places = self._draws().nonzero()[0]
        sequences = [chosen.sequences[place] for place in places.tolist()]
        return zip(sequences, (self.logit_ends[places] - 1).tolist(), strict=True)

    def _draws(self) -> npt.NDArray[np.bool_]:
        """[S] from whose last row a token is drawn."""
        whole: npt.NDArray[np.bool_] = self.chosen.counts == self.chosen.wants
        return whole & (self.wanted > 0)

    @property
    def entries(self) -> list[ScheduledSequence]:
        """A record for each of `chosen`; made when first asked for."""
        if self._entries is None:
            chosen = self.chosen
            ends, wanted = self.logit_ends.tolist(), self.wanted.tolist()
            self._entries = list(
                map(
                    ScheduledSequence,
                    chosen.sequences,
                    chosen.starts.tolist(),
                    chosen.counts.tolist(),
                    self._draws().tolist(),
                    [slice(end - rows, end) for end, rows in zip(ends, wanted, strict=True)],
                )
            )
        return self._entries
