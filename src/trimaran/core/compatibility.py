"""Options that don't go together: the one place where that is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimaran.core.errors import ConfigError

Holds = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two options that can't both have such values.

    Attributes:
        one, other: names of options.
        has, had: whether a value of `one`, of `other`, is of the conflicting kind.
        why: and what to do, in words that follow the two values.
    """

    one: str
    has: Holds
    other: str
    had: Holds
    why: str


CONFLICTS = (
    Conflict(
        "order",
        lambda value: value == "longest-prefix",
        "prefix_cache",
        lambda value: not value,
        "no prefix is ever cached; leave prefix_cache on, or give another order",
    ),
    Conflict(
        "index",
        lambda value: value != "hash",
        "prefix_cache",
        lambda value: not value,
        "there is nothing to be indexed; leave prefix_cache on, or index at 'hash'",
    ),
    Conflict(
        "chunk_size",
        lambda value: value is not None,
        "chunking",
        lambda value: value != "fixed",
        "only fixed chunks have a size; leave chunk_size out, or give chunking 'fixed'",
    ),
    Conflict(
        "order",
        lambda value: value == "longest-prefix",
        "chunking",
        lambda value: value == "static",
        "who waits for a prefix to be computed would miss the whole batch; give another order,"
        " or another chunking",
    ),
    *(
        Conflict(
            option,
            bool,
            "prefix_cache",
            lambda value: not value,
            f"no block has a name; leave prefix_cache on, or {option} out",
        )
        for option in ("kv_host_bytes", "kv_disk_path", "kv_events")
    ),
)


def check_compatible(config: object) -> None:
    """Raises `ConfigError` for the first of `CONFLICTS` that the options are in."""
    for conflict in CONFLICTS:
        value, other = getattr(config, conflict.one), getattr(config, conflict.other)
        if conflict.has(value) and conflict.had(other):
            raise ConfigError(
                f"{conflict.one} is {value!r} and {conflict.other} is {other!r}: {conflict.why}"
            )
