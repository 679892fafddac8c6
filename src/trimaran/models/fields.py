"""Typed reading of a model's configuration that notices what nobody has read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from trimaran.core.errors import CheckpointError, UnsupportedModelError


class Fields:
    """The fields of one configuration; each is honoured, refused, or known not to matter.

    A field that is absent or null takes the default; without one it is an error.
    """

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        """`where` names the file in messages; `prefix` is put before every key."""
        self._values = values
        self.where = where
        self.prefix = prefix
        self._read: set[str] = set()

    def value(self, key: str) -> object:
        """The field as it is, or None."""
        key = self.prefix + key
        self._read.add(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the field is there, be it null."""
        return self.prefix + key in self._values

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, value, f"it must be a whole number from {low} to {high}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "it must be a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(key, value, "it must be finite and above 0")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._or_default(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "it must be text")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id, or None where it is absent."""
        if self.value(key) is None:
            return None
        return self.integer(key, 0, vocab_size - 1)

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids, written as one number or a list."""
        value = self.value(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self.wrong(key, value, "it must be a token id or a list of them")
            if token >= vocab_size:
                raise self.wrong(key, value, f"the vocabulary has {vocab_size} tokens")
        return tuple(ids)

    def only(self, key: str, *allowed: object, why: str = "it is not supported") -> None:
        """Refuses the field unless it is absent or one of `allowed`."""
        value = self.value(key)
        if value is not None and not any(
            value == choice and type(value) is type(choice) for choice in allowed
        ):
            raise self.unsupported(key, value, why)

    def finish(self, harmless: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        """Refuses every field under the prefix that was neither read nor is `harmless`.

        Args:
            harmless: keys that never change what a model computes.
            patterns: regular expressions of more of them.
        """
        known = {self.prefix + key for key in harmless} | self._read
        matchers = [re.compile(pattern) for pattern in patterns]
        for key, value in self._values.items():
            if not key.startswith(self.prefix) or key in known or value is None:
                continue
            own = key.removeprefix(self.prefix)
            if not any(matcher.fullmatch(own) for matcher in matchers):
                raise self.unsupported(
                    own, value, "it is unknown and may change what the model computes"
                )

    def wrong(self, key: str, value: object, problem: str) -> CheckpointError:
        """An error about a field whose value can't be."""
        name = f"{self.where}: {self.prefix}{key}"
        if value is None:
            return CheckpointError(f"{name} is missing")
        return CheckpointError(f"{name} is {_short(value)}; {problem}")

    def unsupported(self, key: str, value: object, problem: str) -> UnsupportedModelError:
        """An error about a field that isn't implemented."""
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{key} is {_short(value)}; {problem}"
        )

    def _or_default(self, key: str, default: object) -> object:
        value = self.value(key)
        return default if value is None else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
