"""What goes to standard error: bars, sizes, times."""

from __future__ import annotations

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cli.terminal import (
    ProgressBar,
    StartupReport,
    human_bytes,
    human_seconds,
    process_age,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(
    st.integers(0, 10**9),
    st.none() | st.integers(0, 10**9),
    st.floats(0, 1e6),
    st.integers(1, 200),
)
def test_a_bar_never_wraps(done: int, total: int | None, elapsed: float, columns: int) -> None:
    bar = ProgressBar("label", total, stream=Terminal())
    assert len(bar.line(done, elapsed, columns, "note")) < columns


def test_a_bar_half_way() -> None:
    bar = ProgressBar("requests", 10, stream=Terminal())
    assert bar.line(5, 2.5, 200, "80 tokens/s") == (
        "requests  [############------------]  50%  5/10  2/s  0:02 left  80 tokens/s"
    )


def test_a_bar_is_drawn_in_place_and_erased() -> None:
    terminal = Terminal()
    with ProgressBar("x", 2, stream=terminal) as bar:
        bar.update(1)
        bar.update(2)  # too soon after the first to be drawn
    assert terminal.getvalue().count("x  [") == 1
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "\n" not in terminal.getvalue()


def test_no_bar_in_a_file() -> None:
    file = io.StringIO()
    with ProgressBar("x", 2, stream=file) as bar:
        bar.update(1)
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_seconds() -> None:
    assert [human_seconds(s) for s in (7.9, 750, 3723)] == ["0:07", "12:30", "1:02:03"]


def test_phases_add_up_to_the_age_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    report = StartupReport(verbose=True)
    report.rest("start")
    report.phase("load", 0.0)
    report.end("first token")
    report.end("first token")
    lines = capsys.readouterr().err.splitlines()
    assert [line[:20].strip() for line in lines] == ["start", "load", "first token", "total"]
    times = [float(line.split()[-2]) for line in lines]
    assert sum(times[:-1]) == pytest.approx(times[-1], abs=0.01)
    assert times[-1] == pytest.approx(process_age(), abs=1.0)


def test_without_verbose_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    report = StartupReport(verbose=False)
    report.rest("start")
    report.end("first token")
    assert capsys.readouterr().err == ""


def test_the_age_of_the_process_grows_with_time() -> None:
    before = process_age()
    time.sleep(0.05)
    assert 0.02 < process_age() - before < 5
