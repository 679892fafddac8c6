"""What `trimaran top` knows of a server, from its /debug/state and /metrics."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from trimaran.core.errors import ConfigError, TrimaranError

KEPT_STEPS = 600
RATE_SECONDS = 5.0
"""Rates are those of the last steps within so many seconds."""


class ServerUnreachableError(TrimaranError):
    """A server doesn't answer, or not with its state."""


Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """The state of a server at one moment.

    Attributes:
        state: as /debug/state has it.
        steps: the last ones, oldest first.
        metrics: the sum of each metric's samples.
    """

    url: str
    state: Mapping[str, Any]
    steps: list[Step]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def rate(self, kind: str) -> float:
        """Of "prefill_tokens" or "decode_tokens", or of "steps", a second."""
        late = [step for step in self.steps if step["begin"] > self.state["now"] - RATE_SECONDS]
        if not late:
            return 0.0
        seconds: float = max(self.state["now"] - late[0]["begin"], 1e-9)
        number = len(late) if kind == "steps" else sum(int(step[kind]) for step in late)
        return number / seconds

    def metric(self, name: str) -> float:
        """Its sum; 0 where the server doesn't have it."""
        return self.metrics.get(name, 0.0)


class Source:
    """Asks one server, and remembers its steps."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 5.0) -> None:
        """
        Raises:
            ConfigError: that is no URL of a server.
        """
        if "://" not in url:
            url = f"http://{url}"
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            sound = False
        if not sound:
            raise ConfigError(f"'{url}' is no server's URL; give one such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)

    def view(self) -> View:
        """The state now.

        Raises:
            ServerUnreachableError: the server can't be asked; says why.
        """
        known = self._steps[-1]["number"] if self._steps else -1
        try:
            state = json.loads(self._get(f"/debug/state?since={known}"))
            if state["step"] < known:  # another process has taken its place
                self._steps.clear()
                state = json.loads(self._get("/debug/state"))
            self._steps.extend(state["steps"])
            return View(self.url, state, list(self._steps), sums(self._get("/metrics")))
        except (ValueError, KeyError, TypeError):
            raise ServerUnreachableError(
                f"what answers at {self.url} is no server of this version of Trimaran"
            ) from None

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                text: bytes = answer.read()
        except urllib.error.HTTPError as error:
            raise ServerUnreachableError(self._told(error)) from None
        except OSError as error:
            why = getattr(error, "reason", None) or error
            raise ServerUnreachableError(f"{self.url} can't be reached: {why}") from None
        return text.decode("utf-8", errors="replace")

    def _told(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"{self.url} wants an API key; give --api-key"
        try:
            message = json.loads(error.read())["error"]["message"]
        except (OSError, ValueError, KeyError, TypeError):
            message = f"HTTP {error.code}"
        return f"{self.url} answers: {message}"


def sums(text: str) -> dict[str, float]:
    """Name -> the sum of its samples, in Prometheus' text format."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def quantile(bounds: list[float], counts: list[float], share: float) -> float | None:
    """Below which this share of the values lies, read off within its bucket as Prometheus
    does; the last bound where it is above all bounds, None where there is no value."""
    total = sum(counts)
    if not total:
        return None
    wanted, below, low = share * total, 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below += count
        low = bound
    return bounds[-1]
