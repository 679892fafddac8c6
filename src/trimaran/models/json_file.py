"""JSON objects of a checkpoint, read within limits."""

from __future__ import annotations

import json
from pathlib import Path

from trimaran.core.errors import CheckpointError

MAX_CONFIG_BYTES = 1 << 20
"""Real ones have some kilobytes; parsed JSON can take twenty times its size."""


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """The object that a file holds.

    Raises:
        CheckpointError: it can't be read, is above `limit` bytes, or is no JSON object.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size > limit:
                raise CheckpointError(
                    f"{path} has {size} bytes, above the limit of {limit} for such a file"
                )
            file.seek(0)
            data = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, what: str) -> dict[str, object]:
    """The object in `data`; `what` names it in messages.

    Raises:
        CheckpointError: not JSON in UTF-8, not an object, a key that comes twice.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{what} is not sound JSON: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} comes twice")
    return values
