"""A server as users have it: a process of its own, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from support.command_line import COMMAND, environment

START_SECONDS = 90.0


class HttpServer:
    """A running `trimaran serve`.

    Attributes:
        url: "http://127.0.0.1:PORT".
        process: of the server.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str) -> None:
        self.process = process
        self.url = url
        self._log = log

    @property
    def log(self) -> str:
        """What it has written to standard error."""
        return self._log.read_text(errors="replace")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0.0 where there is none."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if found is None or found[1] != name:
                continue
            own = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= own.items():
                total += float(found[3])
        return total

    def stop(self, seconds: float = 30.0) -> int:
        """Sends SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def serving(
    *flags: str, env: dict[str, str] | None = None, wait: bool = True
) -> Iterator[HttpServer]:
    """A server on a free port, ready; killed at the end if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*COMMAND, "serve", "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(env),
            )
        try:
            yield HttpServer(process, log, _ready(process, log) if wait else "")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = re.search(r"serves .* at (http\S+)/v1 ", log.read_text(errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server isn't ready; it said:\n{log.read_text(errors='replace')}")


def open_files(server: HttpServer) -> int:
    """File descriptors that the server's process has open."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def resident_bytes(server: HttpServer) -> int:
    """Memory of the server's process that is resident."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
