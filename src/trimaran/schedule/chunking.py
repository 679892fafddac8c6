"""How a step's token budget is shared out."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import ConfigError
from trimaran.schedule.cost_model import StepCostModel, StepLoad

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class Chunking(Protocol):
    """Decides how many of its uncomputed tokens each sequence computes in a step.

    A step is a call of `opens`, then `begin` and `share` for those that run (both again if
    all they gave the budget to were preempted), then `admit` for each that might be admitted.
    Arrays that are handed in are not written to.

    Attributes:
        prompts_first: those that wait have the budget before those that run, unless somebody
            that runs got nothing in the step before.
    """

    prompts_first: bool

    def opens(self, running: int, joined: int) -> bool:
        """A new step; returns whether those that wait may be admitted in it.

        Args:
            running: how many run.
            joined: how many were admitted in the step before.
        """
        ...

    def begin(self, starts: Int32, wants: Int32, targets: Float64) -> None:
        """What those that run want of the step.

        Args:
            starts: [R] tokens computed of each.
            wants: [R] uncomputed tokens of each.
            targets: [R] seconds that an output token of each may take, or inf.
        """
        ...

    def share(self, starts: Int32, wants: Int32, budget: int) -> Int32:
        """One count for each that runs, in the order in which it is their turn: 0 <= count
        <= want, and the first one that wants anything gets at least one token.

        Args:
            budget: tokens left in this step, at least one; the counts' sum may only exceed
                it where a single sequence is served.
        """
        ...

    def admit(self, start: int, want: int, budget: int, alone: bool) -> int:
        """How many of its `want` tokens one that waits would compute if it was admitted now;
        0: it is not to be admitted in this step. At least one where it is `alone`.

        Args:
            start: tokens that the prefix cache has of it.
            budget: tokens left in this step, at least one.
            alone: nobody else is in the step so far.
        """
        ...


class FixedChunk:
    """Each in turn gets what it wants, up to `size` tokens, until the budget is used up.

    Formula: count = min(want, size, budget left).
    Cost: a few array operations, and a Python loop only where not everybody gets all.
    Faults: a step with a chunk takes as long as a full one whatever the decodes in it can
    bear, so the time between tokens is bounded by the size and not by a target; one long
    prompt uses up the budget for the prompts behind it.
    """

    prompts_first = False

    def __init__(self, size: int) -> None:
        self.size = size

    def opens(self, running: int, joined: int) -> bool:
        return True

    def begin(self, starts: Int32, wants: Int32, targets: Float64) -> None:
        pass

    def share(self, starts: Int32, wants: Int32, budget: int) -> Int32:
        return within(np.minimum(wants, np.int32(self.size)), budget)

    def admit(self, start: int, want: int, budget: int, alone: bool) -> int:
        return min(want, self.size, budget)


class WholePrompt:
    """Prompts first, and each in one piece, as engines do that don't chunk prefill.

    Formula: count = want where it fits the budget left, else 0; one that fits no budget is
    served alone. Waiting prompts have the budget before those that run, except after a step
    in which one of these got nothing: so each that runs is passed over in every second step
    at most, and served in any 2·R consecutive ones, R running.
    Cost: a few array operations.
    Faults: a long prompt holds up every decode for as long as it takes; memory for
    activations must do for the longest prompt there can be.
    """

    prompts_first = True

    def opens(self, running: int, joined: int) -> bool:
        return True

    def begin(self, starts: Int32, wants: Int32, targets: Float64) -> None:
        pass

    def share(self, starts: Int32, wants: Int32, budget: int) -> Int32:
        fits = np.cumsum(wants) <= budget
        counts: Int32 = np.where(fits, wants, np.int32(0))
        if not counts.any() and wants.any():
            first = int((wants > 0).argmax())
            counts[first] = wants[first]
        return counts

    def admit(self, start: int, want: int, budget: int, alone: bool) -> int:
        return want if want <= budget or alone else 0


class StaticBatch(WholePrompt):
    """A batch of requests is formed, and served until the last of them has ended: the
    request-level batch of FasterTransformer, as a baseline.

    Formula: once nobody runs, those that wait are admitted, their prompts whole and first,
    until a step admits nobody or `seats` sequences have joined; then nobody until none runs.
    Cost: as `WholePrompt`.
    Faults: seats of those that ended stay empty until the longest output has, and who comes
    meanwhile waits for it. That is what iteration-level scheduling was invented against (Yu
    and others: Orca, 2022).

    Args:
        seats: sequences in a batch, at most.
    """

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._joined = 0
        self._forming = True

    def opens(self, running: int, joined: int) -> bool:
        self._joined += joined
        if running == 0:
            self._joined, self._forming = 0, True
        elif joined == 0 or self._joined >= self._seats:
            self._forming = False
        return self._forming


class FineChunk:
    """Chunks of any size, the largest with which a step keeps what those that decode in it
    are promised.

    Formula: of those that decode in the step, let T be the lowest TPOT target of their SLO
    classes. Decodes get their token each; prompts, in turn, as many as the cost model predicts
    the step to end within T with, `FLOOR` for the first of them in any case, so that a prompt
    of N tokens is computed after N / FLOOR steps whatever the decodes are promised. Where no
    class sets a target, the budget alone counts.
    Cost: some tens of microseconds where a prompt is in the step, else as `FixedChunk`.
    Faults: a target holds on the average of what the model knows, and not where a machine is
    shared; and it can't hold where decodes alone, or with FLOOR, take longer. The weights are
    read once a step, so small chunks make a prompt slower in all.

    Args:
        cost: predicts; fitted by whoever runs the steps.
    """

    prompts_first = False
    FLOOR = 16

    def __init__(self, cost: StepCostModel) -> None:
        self._cost = cost
        self._target = math.inf
        self._load = StepLoad()

    def opens(self, running: int, joined: int) -> bool:
        return True

    def begin(self, starts: Int32, wants: Int32, targets: Float64) -> None:
        decodes = wants == 1
        rows = int(decodes.sum())
        self._target = float(targets[decodes].min()) if rows else math.inf
        self._load = StepLoad(rows, 0, int(starts[decodes].sum()) + rows, 0)

    def share(self, starts: Int32, wants: Int32, budget: int) -> Int32:
        counts = np.minimum(wants, np.int32(1))
        long = (wants > 1).nonzero()[0].tolist()
        if not long:
            return within(counts, budget)
        counts[long] = 0
        first = int((wants > 0).argmax())
        left = budget - min(int(counts.sum()), budget - (wants[first] > 1))
        for place in long:
            if left <= 0:
                break
            count = self._chunk(int(starts[place]), int(wants[place]), left)
            counts[place] = count
            left -= count
        return within(counts, budget)

    def admit(self, start: int, want: int, budget: int, alone: bool) -> int:
        return min(want, budget) if alone else self._chunk(start, want, budget)

    def _chunk(self, start: int, want: int, budget: int) -> int:
        """What one gets of a budget of at least one token; the load of the step with it."""
        count = min(want, budget)
        if self._target < math.inf:
            room = self._cost.chunk_within(self._load, self._target, start)
            if self._load.prefill_tokens == 0:
                room = max(room, self.FLOOR)
            count = min(count, room)
        self._load = self._load.with_chunk(start, count)
        return count


def make_chunking(
    name: str, size: int | None, budget: int, seats: int, cost: StepCostModel
) -> Chunking:
    """The chunking policy of that name (`EngineConfig.chunking`).

    Args:
        size: of fixed chunks; None: as large as the budget.
        budget: tokens of a step, at most.
        seats: sequences that run, at most.

    Raises:
        ConfigError: there is none.
    """
    if name == "fixed":
        return FixedChunk(size or budget)
    if name == "whole":
        return WholePrompt()
    if name == "static":
        return StaticBatch(seats)
    if name == "fine":
        return FineChunk(cost)
    raise ConfigError(f"chunking is '{name}'; give 'static', 'whole', 'fixed' or 'fine'")


def within(counts: Int32, budget: int) -> Int32:
    """The counts in their order as far as their sum stays within `budget`."""
    if int(counts.sum()) <= budget:
        return counts
    ends = np.minimum(np.cumsum(counts), budget)
    return np.diff(ends, prepend=0).astype(np.int32)
