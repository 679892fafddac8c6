"""Other processes: forks of this one, and programs that take processors away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def in_fork(function: Callable[[], str], seconds: float = 60) -> str:
    """What `function` returns in a fork of this process, or the error it ends with.

    Raises:
        TimeoutError: it hangs.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function()
        except BaseException:
            answer = traceback.format_exc()
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    late = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    late.start()
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    late.cancel()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise TimeoutError(f"the fork was killed by signal {os.WTERMSIG(status)}: {answer}")
    return answer


def compute_threads() -> set[str]:
    """The threads of this process that pools of the native back end have started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if (task / "comm").read_text().startswith("compute-"):
                found.add(task.name)
    return found


def started_threads(before: set[str], count: int) -> set[str]:
    """The `count` of them that were started since, once they have told their names."""
    end = time.monotonic() + 20
    while len(started := compute_threads() - before) < count and time.monotonic() < end:
        time.sleep(0.001)
    assert len(started) == count
    return started


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            end = time.monotonic() + 60  # should nobody be left to end it
            while time.monotonic() < end:
                pass
            os._exit(0)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
