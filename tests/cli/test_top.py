"""`trimaran top` against a real server: printed once, and live in a terminal."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import Terminal, run, write_tiny_model
from support.http_server import HttpServer, serving

from trimaran.cli.top_screen import painted, screen, spark
from trimaran.cli.top_source import Source, View, quantile, sums

ENTER, LEAVE = r"\x1b\[\?1049h", r"\x1b\[\?1049l"


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    path = write_tiny_model(tmp_path_factory.mktemp("model"))
    flags = ("--model", str(path), "--backend", "reference", "--warmup", "0", "--api-key", "key")
    with serving(*flags, "--served-model-name", "tiny") as server:
        body = {"prompt": "abcdefgh" * 8, "max_tokens": 20, "ignore_eos": True, "n": 2}
        headers = {"Authorization": "Bearer key"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        yield server


def test_once_prints_what_the_server_says(tiny_server: HttpServer) -> None:
    done = run("top", tiny_server.url, "--once", "--api-key", "key")
    assert done.returncode == 0 and done.stderr == ""
    view = Source(tiny_server.url, "key").view()
    assert "\x1b" not in done.stdout  # no terminal, no colours
    assert tiny_server.url in done.stdout and " tiny  ready" in done.stdout
    assert re.search(r"prefill .*▁?█", done.stdout) and re.search(r"decode .*█", done.stdout)
    blocks = view.state["blocks"]
    assert f"{blocks['free']} free of {blocks['total']} blocks" in done.stdout
    assert re.search(r"0 of \d+ run, 0 wait, 1 ended", done.stdout)
    tpot = re.search(r"TPOT +([\d.]+) (ms|µs)", done.stdout)
    assert tpot is not None
    bounds = view.state["latency"]["tpot"]
    expected = quantile(bounds["bounds"], bounds["counts"], 0.5)
    shown = float(tpot[1]) * (1e-3 if tpot[2] == "ms" else 1e-6)
    assert expected is not None and shown == pytest.approx(expected, rel=0.1)


def test_without_a_key_or_a_server_it_says_what_to_do(tiny_server: HttpServer) -> None:
    refused = run("top", tiny_server.url, "--once")
    assert refused.returncode == 1 and "give --api-key" in refused.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        gone = run("top", nobody, "--once")
    assert gone.returncode == 1 and f"http://{nobody} can't be reached" in gone.stderr
    assert run("top", "ftp://host").returncode == 2
    assert run("top", "http://host:port").returncode == 2
    assert run("top", "--interval", "0").returncode == 2


def test_live_it_follows_the_server_and_the_size_and_gives_the_terminal_back(
    tiny_server: HttpServer,
) -> None:
    words = ("top", tiny_server.url, "--interval", "0.2", "--api-key", "key")
    with Terminal(*words) as terminal:
        modes = terminal.modes
        terminal.resize(90, 30)
        terminal.wait_for(ENTER)
        terminal.wait_for("0 of .* run")
        stop = threading.Event()
        working = threading.Thread(target=_work, args=(tiny_server, stop))
        working.start()
        try:
            terminal.wait_for(r"running .*watched-by-top")
            terminal.resize(40, 8)
            terminal.wait_for(r"(\x1b\[J.*){3}")  # at the latest the second picture has it
            begin = len(terminal.text)
            terminal.wait_for(r"(\x1b\[J.*){4}")
            assert terminal.modes != modes
        finally:
            stop.set()
            working.join()
        pictures = terminal.text[begin:].split("\x1b[J")[1:-1]
        assert len(pictures) >= 2
        assert _widest(pictures) <= 40
        assert all("\x1b[1;1H" in each and "\x1b[9;1H" not in each for each in pictures)
        terminal.type("q")
        assert terminal.wait_for_exit() == 0
        terminal.wait_for(LEAVE)
        assert "\x1b[?25h" in terminal.text and terminal.modes == modes


@pytest.mark.parametrize(("how", "code"), [("\x03", 0), ("term", 143)])
def test_however_it_ends_the_terminal_is_as_before(how: str, code: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Terminal("top", url) as terminal:
            modes = terminal.modes
            terminal.wait_for("can't be reached.*trying again")
            if how == "term":
                terminal.end()
            else:
                terminal.type(how)
            assert terminal.wait_for_exit() == code
            terminal.wait_for(LEAVE)
            assert terminal.modes == modes


def _work(server: HttpServer, stop: threading.Event) -> None:
    body = {"prompt": "ab", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer key", "x-request-id": "watched-by-top"}
    while not stop.is_set():
        request = body | {"request_id": "watched-by-top"}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=request, headers=headers, timeout=60
        ) as answer:
            for _ in answer.iter_lines():
                if stop.is_set():
                    break


def _widest(pictures: list[str]) -> int:
    """Characters of the widest line, control sequences left out."""
    lines = [line for picture in pictures for line in re.split(r"\x1b\[\d+;1H", picture)]
    return max(len(re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line)) for line in lines)


# ---------------------------------------------------------------------- parts


def test_quantiles_are_read_off_within_their_bucket() -> None:
    bounds = [1.0, 2.0, 4.0]
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [2, 2, 0, 0], 0.5) == 1.0
    assert quantile(bounds, [0, 4, 0, 0], 0.25) == 1.25
    assert quantile(bounds, [0, 0, 4, 0], 0.5) == 3.0
    assert quantile(bounds, [1, 0, 0, 3], 0.99) == 4.0


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3), st.floats(0.01, 1))
def test_quantiles_grow_with_the_share(counts: list[float], share: float) -> None:
    bounds = [1.0, 2.0]
    low, high = quantile(bounds, counts, share / 2), quantile(bounds, counts, share)
    assert (low is None) == (high is None) == (sum(counts) == 0)
    if low is not None and high is not None:
        assert 0 <= low <= high <= 2


def test_a_spark_has_a_column_a_value() -> None:
    assert spark([0, 1, 4, 8], 8) == " ▂▅█"
    assert spark([0, 0], 0) == ""


def test_samples_of_a_metric_are_summed_up() -> None:
    text = '# HELP a b\n# TYPE a gauge\na{x="1 2"} 3\na{x="}"} 4.5\nb:c 1e3\n'
    assert sums(text) == {"a": 7.5, "b:c": 1000.0}


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 40), st.booleans(), st.text())
def test_no_line_is_too_wide_and_no_text_moves_the_cursor(
    columns: int, rows: int, running: int, color: bool, name: str
) -> None:
    lines = screen(_view(running, name + "\x1b[2J\n"), columns, rows, color)
    assert 0 < len(lines) <= rows
    for line in lines:
        bare = re.sub(r"\x1b\[\d+m", "", line)
        assert len(bare) <= columns
        assert "\x1b" not in bare and "\n" not in bare and "\r" not in bare
        assert color or "\x1b" not in line


def test_what_cant_be_shown_is_a_question_mark() -> None:
    assert painted([("a\x1b[31mb\x07", "1")], 80, color=False) == "a?[31mb?"


def test_more_requests_than_fit_are_counted() -> None:
    lines = screen(_view(40, "r"), 100, 24, color=False)
    assert len(lines) == 24
    shown = sum(line.startswith("running") for line in lines)
    assert lines[-1] == f"and {40 - shown} more" and shown > 3


def _view(running: int, name: str) -> View:
    request: dict[str, Any] = {
        "id": name,
        "age": 1.5,
        "prompt_tokens": 10,
        "computed_tokens": 12,
        "output_tokens": 3,
        "cached_tokens": 4,
        "preemptions": 0,
    }
    step = {"number": 1, "begin": 9.0, "seconds": 0.01, "prefill_tokens": 5, "decode_tokens": 2}
    histogram = {"bounds": [0.1, 1.0], "counts": [1, 2, 0]}
    state = {
        "now": 10.0,
        "step": 1,
        "running": running,
        "waiting": 0,
        "requests": {"running": [request] * running, "waiting": []},
        "blocks": {"total": 100, "free": 50, "held": 30, "cached": 20, "size": 16},
        "prefix_cache": {"queried": 10, "hit": 5},
        "server": {"phase": "ready", "model": name, "max_num_seqs": 64, "finished_requests": 3},
        "latency": {"ttft": histogram, "tpot": histogram, "itl": histogram},
    }
    return View("http://host", state, [step] * 300, {"vllm:num_preemptions_total": 2.0})
