"""Compute threads: where they run, beside other programs, and in forks."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.plans import Line, step
from support.processes import busy_processes, compute_threads, in_fork, started_threads
from support.quantized import quantized_model

from trimaran.compute.native import _native
from trimaran.compute.native.backend import NativeBackend
from trimaran.core.errors import BackendError
from trimaran.models.model import Model

TOKENS = np.random.default_rng(5).integers(0, 256, 60).tolist()
ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def model() -> Model:
    return quantized_model("Q4_1")


def decode(backend: NativeBackend, pause: float = 0.0) -> bytes:
    """The bits of the logits of a prompt and of many steps of one token."""
    backend.allocate_cache(4, 16)
    line = Line(TOKENS, list(range(4)))
    step(backend, [(line, 20)], 16)
    while line.computed < len(TOKENS):
        step(backend, [(line, 1)], 16)
        if pause:
            time.sleep(pause)
    return np.array(line.logits).tobytes()


@pytest.fixture(scope="module")
def alone(model: Model) -> bytes:
    return decode(NativeBackend(model, threads=1))


def affinities(threads: set[str]) -> list[list[int]]:
    """The processors that threads of this process may use."""
    found = []
    for thread in threads:
        status = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8")
        mask = next(line for line in status.splitlines() if line.startswith("Cpus_allowed:"))
        bits = int(mask.split(":")[1].replace(",", ""), 16)
        found.append([cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1])
    return sorted(found)


def test_threads_stay_apart_only_where_each_has_a_processor(model: Model) -> None:
    for threads in (len(ALLOWED), len(ALLOWED) + 1):
        before = compute_threads()
        backend = NativeBackend(model, threads=threads)
        decode(backend)
        started = affinities(started_threads(before, threads - 1))
        if threads == len(ALLOWED):
            assert started == [[cpu] for cpu in ALLOWED[1:]]
        else:
            assert started == [ALLOWED] * (threads - 1)
        assert sorted(os.sched_getaffinity(0)) == ALLOWED  # the caller's is its own
        backend.close()


@pytest.mark.parametrize("threads", [2, 3, 9])
def test_the_same_bits_beside_busy_programs(model: Model, alone: bytes, threads: int) -> None:
    with busy_processes(2):
        assert decode(NativeBackend(model, threads=threads)) == alone


def test_threads_that_slept_come_back(model: Model, alone: bytes) -> None:
    assert decode(NativeBackend(model, threads=3), pause=0.002) == alone


def test_engines_side_by_side(model: Model, alone: bytes) -> None:
    """Each has its own threads, all on the same processors."""
    results: list[bytes] = []
    callers = [
        threading.Thread(target=lambda: results.append(decode(NativeBackend(model, threads=2))))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [alone] * 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_in_a_fork_a_back_end_is_refused_and_another_runs(
    model: Model, alone: bytes, threads: int
) -> None:
    backend = NativeBackend(model, threads=threads)
    assert decode(backend) == alone

    def in_child() -> str:
        with pytest.raises(BackendError, match=rf"process {os.getppid()}.*load the model here"):
            decode(backend)
        backend.close()
        gc.collect()
        return str(decode(NativeBackend(model, threads=2)) == alone)

    assert in_fork(in_child) == "True"
    assert decode(backend) == alone


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_steps(model: Model, alone: bytes) -> None:
    backend = NativeBackend(model, threads=2)
    stop = threading.Event()

    def steps() -> None:
        while not stop.is_set():
            decode(backend)

    caller = threading.Thread(target=steps)
    caller.start()
    try:
        for _ in range(3):
            answer = in_fork(lambda: str(decode(NativeBackend(model, threads=2)) == alone))
            assert answer == "True"
    finally:
        stop.set()
        caller.join()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_meet(threads: int) -> None:
    assert _native.meet(threads, 200)


@pytest.mark.parametrize("fail", [0, 2])
def test_an_error_on_any_thread_is_raised(fail: int) -> None:
    with pytest.raises(RuntimeError, match=f"thread {fail}"):
        _native.meet(3, 5, fail)
