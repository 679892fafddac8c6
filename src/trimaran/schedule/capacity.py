"""Who may hold blocks: what is reserved at admission, and who gives back when they run out."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Protocol

from trimaran.core.errors import ConfigError
from trimaran.core.request import Request, Sequence


class Capacity(Protocol):
    """Decides over blocks."""

    def reserve(self, sequence: Sequence) -> int:
        """Tokens for which the cache must have blocks at all, if `sequence` is ever to be
        admitted with the forks that are to come of it."""
        ...

    def admits(self, sequence: Sequence) -> bool:
        """Whether it may be admitted now, as far as promises to those that run go; that there
        are blocks for its known tokens is found out apart from this."""
        ...

    def started(self, sequence: Sequence) -> None:
        """It was admitted (forks aren't: they were admitted with their parent)."""
        ...

    def stopped(self, sequence: Sequence, seats: int) -> None:
        """It or a fork of it runs no more, nor will the forks for which `seats` were kept."""
        ...

    def lends(self, blocks: int) -> bool:
        """Whether a load from a lower tier may hold so many blocks for now."""
        ...

    def lent(self, blocks: int) -> None:
        """A load holds so many more blocks from now on, or, below zero, gives them back."""
        ...

    def victim(self, running: Row[Sequence], needy: Sequence) -> Sequence:
        """Who is preempted so that `needy` gets a block; may be `needy` itself.

        Args:
            running: in order of admission; not empty.
        """
        ...


class MaxUtilization:
    """Admits what fits now; the last admitted gives its blocks back and computes again.

    Formula: reserve = tokens known so far; victim = the last of those that run.
    Cost: O(1).
    Faults: outputs grow into memory that was given away, so under pressure work is thrown
    away (what the prefix index still has is found again) and a preempted sequence's next
    token is late. In return the cache is never idle for fear of what may come, and the
    first admitted always goes on.
    """

    def reserve(self, sequence: Sequence) -> int:
        return sequence.total

    def admits(self, sequence: Sequence) -> bool:
        return True

    def started(self, sequence: Sequence) -> None:
        pass

    def stopped(self, sequence: Sequence, seats: int) -> None:
        pass

    def lends(self, blocks: int) -> bool:
        return True

    def lent(self, blocks: int) -> None:
        pass

    def victim(self, running: Row[Sequence], needy: Sequence) -> Sequence:
        return running[-1]


@dataclass(slots=True)
class _Promise:
    """Blocks promised to the running sequences of one request.

    Attributes:
        shared: full blocks of the prompt, which all of them hold.
        each: blocks of its own that each may come to hold.
        sequences: how many of them run or are still to be forked.
    """

    shared: int
    each: int
    sequences: int

    @property
    def blocks(self) -> int:
        return self.shared + self.each * self.sequences


class NoEvict:
    """Admits a sequence only with room for its longest output, and never preempts
    (TensorRT-LLM's GUARANTEED_NO_EVICT).

    Formula: a request is promised s + n·(ceil(L / B) - s) blocks: of B tokens each, for n
    sequences that share the s full blocks of the prompt and are at most L tokens long,
    prompt and `max_tokens` together but for the last token, which is never computed. It is
    admitted where all promises together stay within the cache.
    Cost: O(1) an operation.
    Faults: outputs mostly end before `max_tokens`, so blocks lie idle that could serve
    others, and without `max_tokens` a request is promised the whole context. Prefixes that
    several requests share are promised to each. In return a request that runs is never
    thrown back, so its tokens come evenly.

    Args:
        num_blocks, block_size: of the cache.
        max_model_len: tokens a sequence has at most.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._longest = max_model_len
        self._promised = 0
        self._promises: dict[Request, _Promise] = {}

    @property
    def promised(self) -> int:
        """Blocks promised to all that run, and held by loads from a lower tier."""
        return self._promised

    def reserve(self, sequence: Sequence) -> int:
        return self._promise(sequence).blocks * self._block_size

    def admits(self, sequence: Sequence) -> bool:
        return self._promised + self._promise(sequence).blocks <= self._num_blocks

    def started(self, sequence: Sequence) -> None:
        promise = self._promise(sequence)
        self._promises[sequence.request] = promise
        self._promised += promise.blocks

    def stopped(self, sequence: Sequence, seats: int) -> None:
        promise = self._promises[sequence.request]
        self._promised -= promise.each * (1 + seats)
        promise.sequences -= 1 + seats
        if promise.sequences == 0:
            self._promised -= promise.shared
            del self._promises[sequence.request]

    def lends(self, blocks: int) -> bool:
        return self._promised + blocks <= self._num_blocks

    def lent(self, blocks: int) -> None:
        self._promised += blocks

    def victim(self, running: Row[Sequence], needy: Sequence) -> Sequence:
        raise AssertionError(
            f"{needy.id} lacks a block, though {self._promised} of {self._num_blocks} are promised"
        )

    def _promise(self, sequence: Sequence) -> _Promise:
        size, params = self._block_size, sequence.request.params
        known = sequence.total
        longest = self._longest
        if params.max_tokens is not None and not sequence.open:
            longest = min(longest, sequence.prompt_length + params.max_tokens)
        shared = sequence.prompt_length // size
        each = -(-max(longest - 1, known) // size) - shared
        return _Promise(shared, each, 1 if sequence.forked else params.n)


def make_capacity(
    name: str, num_blocks: int, block_size: int, max_model_len: int | None = None
) -> Capacity:
    """The capacity policy of that name (`EngineConfig.capacity`).

    Args:
        num_blocks, block_size: of the cache.
        max_model_len: tokens a sequence has at most; None: as many as the cache holds.

    Raises:
        ConfigError: there is none.
    """
    if name == "max-utilization":
        return MaxUtilization()
    if name == "no-evict":
        return NoEvict(num_blocks, block_size, max_model_len or num_blocks * block_size)
    raise ConfigError(f"capacity is '{name}'; give 'max-utilization' or 'no-evict'")
