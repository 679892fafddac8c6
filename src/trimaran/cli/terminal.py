"""What the commands write to standard error: progress, rates, sizes, times of the start-up."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TextIO

REDRAW_SECONDS = 0.1


def say(text: str = "") -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def human_bytes(count: float) -> str:
    """ "98.4 MB": powers of 1000, as download sizes and disks are stated."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """ "0:07", "12:30", "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressBar:
    """One line that is redrawn in place, on a terminal only; elsewhere nothing is written.

    Use as a context manager: the line is erased at the end.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        show: Callable[[float], str] = lambda count: f"{count:.0f}",
        stream: TextIO | None = None,
    ) -> None:
        """
        Args:
            total: what `done` will be at the end, where it is known.
            show: a count as text.
        """
        self._label = label
        self._total = total
        self._show = show
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """`done` of `total` is reached; redraws at most ten times a second."""
        self._total = total or self._total
        now = time.monotonic()
        if self._live and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            columns = shutil.get_terminal_size().columns
            line = self.line(done, now - self._start, columns, note)
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()

    def line(self, done: int, elapsed: float, columns: int, note: str = "") -> str:
        """The bar as text, at most `columns` - 1 wide."""
        rate = done / elapsed if elapsed > 0 else 0.0
        pace = f"{self._show(rate)}/s" if rate >= 1 or rate == 0 else f"{rate:.2f}/s"
        if self._total is None:
            parts = [self._show(done), pace]
        else:
            share = min(1.0, done / self._total) if self._total else 1.0
            left = (self._total - done) / rate if rate > 0 else 0.0
            filled = round(share * 24)
            parts = [
                f"[{'#' * filled}{'-' * (24 - filled)}] {share:4.0%}",
                f"{self._show(done)}/{self._show(self._total)}",
                pace,
                f"{human_seconds(left)} left" if rate > 0 else "",
            ]
        text = "  ".join(part for part in (self._label, *parts, note) if part)
        return text[: max(0, columns - 1)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class DownloadReport:
    """Tells of a model being fetched: a bar on a terminal, else a line."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._bar: ProgressBar | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            size = f" ({human_bytes(total)})" if total else ""
            say(f"fetching {self._model}{size}")
            self._bar = ProgressBar(self._model, total or None, show=human_bytes)
        self._bar.update(done, total or None)

    def close(self) -> None:
        """Erases the bar."""
        if self._bar is not None:
            self._bar.__exit__()


class StartupReport:
    """With `verbose`, prints how long each phase took from the start of the process to the
    first token; without it, nothing."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._told = 0.0
        self._ended = False

    def phase(self, name: str, seconds: float) -> None:
        """A phase took so long; has the signature of `Phases.report`."""
        self._told += seconds
        if self._verbose:
            say(f"  {name:<18} {seconds:7.3f} s")

    def rest(self, name: str) -> None:
        """All time since the last phase was for `name`."""
        if self._verbose:
            self.phase(name, process_age() - self._told)

    def end(self, name: str) -> None:
        """The last phase, `name`, is over; only the first call counts."""
        if self._verbose and not self._ended:
            self._ended = True
            self.rest(name)
            say(f"  {'total':<18} {self._told:7.3f} s")


def process_age() -> float:
    """Seconds since this process was started (to a clock tick, 10 ms); where the system
    doesn't tell, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


_IMPORTED = time.monotonic()
