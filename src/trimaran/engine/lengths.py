"""How long the sequences of a model are: measured while it runs, kept for the next start."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.models.store import cache_folder

_FORGET = 4096
"""Sequences above which older ones count less: what is known halves."""


@dataclass(slots=True)
class Lengths:
    """Counts sequences by length, in steps of an eighth of a power of two.

    Attributes:
        count, tokens: sequences that ended, and their tokens in all.
        bins: of each length, rounded down, how many.
    """

    count: float = 0.0
    tokens: float = 0.0
    bins: dict[int, float] = field(default_factory=dict)

    def add(self, length: int) -> None:
        """A sequence of so many tokens has ended."""
        step = max(1, 1 << max(0, length.bit_length() - 4))
        own = length - length % step
        self.count += 1
        self.tokens += length
        self.bins[own] = self.bins.get(own, 0.0) + 1

    @property
    def mean(self) -> float:
        """Tokens of a sequence; 0 before there is one."""
        return self.tokens / self.count if self.count else 0.0

    def quantile(self, share: float) -> int:
        """The length below which about this share of the sequences lies."""
        wanted, below = share * self.count, 0.0
        for length in sorted(self.bins):
            below += self.bins[length]
            if below >= wanted:
                return length
        return 0

    def join(self, other: Lengths) -> None:
        """Takes in what another has counted."""
        self.count += other.count
        self.tokens += other.tokens
        for length, number in other.bins.items():
            self.bins[length] = self.bins.get(length, 0.0) + number
        if self.count > _FORGET:
            share = _FORGET / 2 / self.count
            self.count *= share
            self.tokens *= share
            self.bins = {length: number * share for length, number in self.bins.items()}


class LengthRecord:
    """Lengths of one model's sequences, over all engines of this user, in a small file.

    A file that can't be read counts as empty, one that can't be written is left: a record is
    a help to a later start and never a reason to fail.
    """

    def __init__(self, model: Path, folder: Path | None = None) -> None:
        name = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:32]
        self._path = (folder or cache_folder() / "lengths") / f"{name}.json"

    def read(self) -> Lengths:
        """What is known so far."""
        try:
            found = json.loads(self._path.read_bytes())
            lengths = Lengths(
                float(found["count"]),
                float(found["tokens"]),
                {int(length): float(number) for length, number in found["bins"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Lengths()
        sound = lengths.count > 0 and lengths.tokens >= lengths.count
        return lengths if sound else Lengths()

    def add(self, lengths: Lengths) -> None:
        """Adds what an engine has counted; engines that end at the same time don't lose any."""
        if not lengths.count:
            return
        with contextlib.suppress(OSError), self._locked():
            known = self.read()
            known.join(lengths)
            text = json.dumps({"count": known.count, "tokens": known.tokens, "bins": known.bins})
            written = self._path.with_suffix(f".{os.getpid()}")
            written.write_text(text)
            written.replace(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path.with_suffix(".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
