"""A trace: who asks for what, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimaran.core.errors import ParameterError
from trimaran.core.slo import STANDARD, SloClass, slo_class

_FIELDS = {"arrival", "prompt", "output_tokens", "priority", "slo", "cache_salt"}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds from the start of the trace.
        prompt: token ids.
        output_tokens: how many it generates, whatever they are.
        priority, slo, cache_salt: as of a `Request`.
    """

    arrival: float
    prompt: tuple[int, ...]
    output_tokens: int
    priority: int = 0
    slo: SloClass = STANDARD
    cache_salt: str = ""


def read_trace(path: str | Path) -> list[TraceRequest]:
    """A trace from a file of JSON lines, in order of arrival.

    Each line is {"arrival": seconds, "prompt": [ids], "output_tokens": n} and may have
    "priority", "slo" (a name) and "cache_salt".

    Raises:
        ParameterError: a line is no such object; names the line and the field.
    """
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if line.strip():
            try:
                found.append(_request(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ParameterError("trace", f"{path}, line {number}: {error}") from None
    return sorted(found, key=lambda request: request.arrival)


def write_trace(path: str | Path, trace: Iterable[TraceRequest]) -> None:
    """Writes a trace as `read_trace` reads it."""
    with open(path, "w") as file:
        for request in trace:
            line = {
                "arrival": request.arrival,
                "prompt": list(request.prompt),
                "output_tokens": request.output_tokens,
                "priority": request.priority,
                "slo": request.slo.name,
                "cache_salt": request.cache_salt,
            }
            file.write(json.dumps(line) + "\n")


def spread(trace: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The trace with its arrivals `factor` times as far apart."""
    return [replace(request, arrival=request.arrival * factor) for request in trace]


def _request(line: Any) -> TraceRequest:
    if not isinstance(line, dict):
        raise ValueError("it isn't an object")
    unknown = set(line) - _FIELDS
    if unknown:
        raise ValueError(f"unknown field '{min(unknown)}'")
    for name in ("arrival", "prompt", "output_tokens"):
        if name not in line:
            raise ValueError(f"'{name}' is missing")
    prompt = tuple(line["prompt"])
    if not prompt or not all(isinstance(token, int) and token >= 0 for token in prompt):
        raise ValueError("'prompt' must be a list of token ids, at least one")
    if not isinstance(line["output_tokens"], int) or line["output_tokens"] < 1:
        raise ValueError(f"'output_tokens' is {line['output_tokens']!r}; give at least 1")
    return TraceRequest(
        float(line["arrival"]),
        prompt,
        line["output_tokens"],
        int(line.get("priority", 0)),
        slo_class(line.get("slo", STANDARD)),
        str(line.get("cache_salt", "")),
    )
