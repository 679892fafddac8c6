"""Answers a file of requests, many at a time, in the order of its lines."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from trimaran.cli.parser import FAILED
from trimaran.cli.records import (
    LineError,
    answer_record,
    check_unicode,
    error_record,
    parse_line,
    to_json,
)
from trimaran.cli.running import Running
from trimaran.cli.terminal import ProgressBar, StartupReport, say
from trimaran.core.errors import EngineClosedError, TrimaranError

if TYPE_CHECKING:
    from trimaran.core.outputs import RequestOutput
    from trimaran.engine.llm import LLM

AHEAD = 4
"""Requests handed to the engine at once, in multiples of the sequences of a step: enough
that a long answer at the head of the line doesn't leave seats empty, in bounded memory."""

Entry = Running | dict[str, Any]
"""A request that runs, or the error record of a line that is none."""


def answer_lines(
    llm: LLM,
    lines: TextIO,
    target: TextIO,
    defaults: Mapping[str, Any],
    quiet: bool,
    startup: StartupReport,
) -> int:
    """Writes a record for every line that isn't blank; returns the exit code."""
    tally = Tally()
    with ProgressBar("requests", _count_lines(lines)) as bar:

        def show() -> None:
            if not quiet:
                bar.update(tally.lines, note=f"{tally.output_rate():.0f} tokens/s")

        show()
        for record in _answers(llm, _numbered(lines), defaults, tally, show):
            startup.end("first answer")
            print(to_json(record), file=target, flush=True)
            show()
    if not quiet:
        say(tally.summary())
    if tally.failed:
        say(f"trimaran: {tally.failed} of {tally.lines} requests failed; see their records")
    return FAILED if tally.failed else 0


class Tally:
    """What was answered so far."""

    def __init__(self) -> None:
        self.lines = self.failed = 0
        self._prompt = self._cached = self._output = 0
        self._start = time.perf_counter()

    def add(self, output: RequestOutput | None) -> None:
        """One more line is done; None: it failed."""
        self.lines += 1
        if output is None:
            self.failed += 1
            return
        self._prompt += len(output.prompt_token_ids)
        self._cached += output.cached_tokens
        self._output += sum(len(one.token_ids) for one in output.outputs)

    def output_rate(self) -> float:
        """Tokens generated a second."""
        return self._output / max(1e-9, time.perf_counter() - self._start)

    def summary(self) -> str:
        """One line: requests, tokens and rates over the whole time."""
        elapsed = max(1e-9, time.perf_counter() - self._start)
        cached = f" ({self._cached} cached)" if self._cached else ""
        return (
            f"requests: {self.lines} in {elapsed:.2f} s, {self.lines / elapsed:.2f}/s"
            f" · {self._prompt} prompt tokens{cached}"
            f" · {self._output} tokens generated, {self._output / elapsed:.1f} tokens/s"
        )


def _answers(
    llm: LLM,
    lines: Iterator[tuple[int, str]],
    defaults: Mapping[str, Any],
    tally: Tally,
    show: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Records in the order of the lines; reads only so far ahead as the engine has use for.

    Args:
        show: called at every step while an answer is waited for.
    """
    limit = AHEAD * llm.config.max_num_seqs
    entries: deque[Entry] = deque()
    for number, text in lines:
        entries.append(_start(llm, text, number, defaults))
        if len(entries) >= limit:
            yield _finish(entries.popleft(), tally, show)
    while entries:
        yield _finish(entries.popleft(), tally, show)


def _start(llm: LLM, text: str, number: int, defaults: Mapping[str, Any]) -> Entry:
    identity = None
    try:
        check_unicode(text, "the line")
        ask = parse_line(text, number, defaults)
        identity = ask.id
        return Running(llm, ask)
    except LineError as error:
        return error_record(error.id, number, error.kind, str(error))
    except EngineClosedError:
        raise
    except TrimaranError as error:
        return error_record(identity, number, type(error).__name__, str(error))


def _finish(entry: Entry, tally: Tally, show: Callable[[], None]) -> dict[str, Any]:
    if isinstance(entry, dict):
        tally.add(None)
        return entry
    ask = entry.ask
    try:
        for _ in entry.texts():
            show()
        output = entry.finish()
    except TrimaranError as error:
        tally.add(None)
        return error_record(ask.id, ask.line, type(error).__name__, str(error))
    tally.add(output)
    return answer_record(ask, output)


def _numbered(lines: TextIO) -> Iterator[tuple[int, str]]:
    for number, text in enumerate(lines, 1):
        if text.strip():
            yield number, text


def _count_lines(lines: TextIO) -> int | None:
    """Lines with a request in a plain file; None where only reading on would tell."""
    if lines is sys.stdin or not stat.S_ISREG(os.fstat(lines.fileno()).st_mode):
        return None
    count = sum(1 for line in lines if line.strip())
    lines.seek(0)
    return count
