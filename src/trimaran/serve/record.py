"""What becomes of one HTTP request: filled in on its way, told in the log and in a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from trimaran.core.outputs import RequestMetrics
from trimaran.core.request import FinishReason
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.delta_inbox import DeltaInbox

SESSION = 101
"""The status of a WebSocket that was opened."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time in the engine, on the engine's clock."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the engine's requests behind an HTTP request: one a prompt.

    Attributes:
        phases: queue, prefill and decode, as far as it got; the last one ends where it did.
        first_token: when it came, on the engine's clock.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    finish_reason: str
    phases: tuple[Phase, ...]
    first_token: float | None


@dataclass(slots=True)
class Record:
    """One HTTP request.

    Attributes:
        request_id: as its client sees it.
        trace_id: of the trace it belongs to, 32 hexadecimal digits, if there is one.
        model: the name under which it was answered.
        params: of its sampling, once it was handed to the engine; None where nothing is drawn.
        parts: those of it that have ended; of a session, which may have any number, one that
            sums them up.
        on_part: of a session: told of each.
    """

    request_id: str
    trace_id: str | None = None
    model: str | None = None
    params: SamplingParams | None = None
    parts: list[Part] = field(default_factory=list)
    on_part: Callable[[Part], None] | None = None
    began_ns: int = field(default_factory=time.time_ns)
    _began: float = field(default_factory=time.perf_counter)
    _offset: float = 0.0  # from the engine's clock to that of `_began`

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def started(self, params: SamplingParams | None, now: float) -> None:
        """It is handed to the engine, whose clock shows `now`."""
        self.params = params
        self._offset = time.perf_counter() - now

    def nanoseconds(self, engine_time: float) -> int:
        """A time of the engine's clock as nanoseconds since 1970, in line with `began_ns`."""
        return self.began_ns + round((engine_time + self._offset - self._began) * 1e9)

    def ended(self, stream: DeltaInbox, metrics: RequestMetrics | None, now: float) -> None:
        """One of the engine's requests has ended, or its client has left.

        Args:
            metrics: its times, as far as it got; None where the engine has not seen it.
            now: on the engine's clock.
        """
        self._add(
            Part(
                stream.request.id,
                len(stream.request.prompt),
                stream.tokens,
                metrics.cached_tokens if metrics else 0,
                metrics.preemptions if metrics else 0,
                (stream.finish_reason or FinishReason.ABORT).value,
                () if metrics is None else _phases(metrics, now),
                None if metrics is None else metrics.first_token,
            )
        )

    def ended_together(
        self, streams: Sequence[DeltaInbox], metrics: Sequence[RequestMetrics | None], now: float
    ) -> None:
        """All of the engine's requests have ended that made vectors of texts, of which there
        may be thousands: they are one part, from the first one's arrival to the last one's end.

        Args:
            metrics: of each, as in `ended`.
            now: on the engine's clock.
        """
        if not streams:
            return
        known = [each for each in metrics if each is not None]
        begun = [each.first_scheduled for each in known if each.first_scheduled is not None]
        whole = RequestMetrics(
            arrival=min((each.arrival for each in known), default=now),
            first_scheduled=min(begun, default=None),
            finished=max((each.finished or now for each in known), default=now),
        )
        reasons = [(stream.finish_reason or FinishReason.ABORT).value for stream in streams]
        bad = [reason for reason in reasons if reason != FinishReason.STOP.value]
        self._add(
            Part(
                streams[0].request.id,
                sum(len(stream.request.prompt) for stream in streams),
                0,
                sum(each.cached_tokens for each in known),
                sum(each.preemptions for each in known),
                (bad or reasons)[0],
                _phases(whole, now),
                None,
            )
        )

    def _add(self, part: Part) -> None:
        if self.on_part is None:
            self.parts.append(part)
            return
        self.on_part(part)
        both = [*self.parts, part]
        self.parts = [
            Part(
                part.request_id,
                sum(each.prompt_tokens for each in both),
                sum(each.output_tokens for each in both),
                sum(each.cached_tokens for each in both),
                sum(each.preemptions for each in both),
                part.finish_reason,
                (),
                None,
            )
        ]

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds in the engine, of the prompt that took longest; None where there is none."""
        firsts = [
            part.first_token - part.phases[0].begin
            for part in self.parts
            if part.first_token is not None
        ]
        return max(firsts, default=None)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds of a token after the first one of a sequence; None where there is none."""
        n = 1 if self.params is None else self.params.n
        seconds, tokens = 0.0, 0.0
        for part in self.parts:
            after = part.output_tokens / n - 1
            if len(part.phases) == 3 and after > 0:
                seconds, tokens = seconds + part.phases[2].seconds, tokens + after
        return seconds / tokens if tokens else None

    def error_type(self, status: int) -> str | None:
        """What went wrong, in a word of few: None where nothing did.

        Args:
            status: of the answer; 0 or 499 where its client left, 101 of a session.
        """
        if status in (0, 499):
            return "client_disconnected"
        if status >= 400:
            return str(status)
        reasons = {part.finish_reason for part in self.parts}
        if "error" in reasons:
            return "request_failed"
        return "client_disconnected" if "abort" in reasons and status != SESSION else None

    def facts(self) -> dict[str, Any]:
        """For a log line. Where there are several prompts, tokens are summed up, and times are
        those of the prompt that took longest."""
        found: dict[str, Any] = {}
        if self.trace_id is not None:
            found["trace_id"] = self.trace_id
        if self.model is not None:
            found["model"] = self.model
        if not self.parts:
            return found
        for part in self.parts:
            for phase in part.phases:
                name = f"{phase.name}_seconds"
                found[name] = max(found.get(name, 0.0), round(phase.seconds, 6))
        for name in ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions"):
            found[name] = sum(getattr(part, name) for part in self.parts)
        reasons = dict.fromkeys(part.finish_reason for part in self.parts)
        return found | {"finish_reason": ",".join(reasons)}


def _phases(metrics: RequestMetrics, now: float) -> tuple[Phase, ...]:
    end = metrics.finished or now
    # Of a prompt that came in pieces the time before its end isn't waiting.
    arrival, scheduled = metrics.prompt_complete or metrics.arrival, metrics.first_scheduled
    if scheduled is not None:
        scheduled = max(scheduled, arrival)
    times = (arrival, scheduled, metrics.first_token)
    found: list[Phase] = []
    for i, name in enumerate(("queue", "prefill", "decode")):
        begin = times[i]
        if begin is None:
            break
        after = times[i + 1] if i < 2 else None
        found.append(Phase(name, begin, end if after is None else after))
    return tuple(found)


current: ContextVar[Record | None] = ContextVar("current", default=None)
"""That of the HTTP request that is being answered."""
