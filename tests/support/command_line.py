"""Runs the `trimaran` command as a person or a shell does: as a process, or in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.tiny_files import tiny_gguf

COMMAND = [sys.executable, "-m", "trimaran"]
DEADLINE = 60.0
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's, with variables changed or (None) left out; output is buffered."""
    merged: dict[str, str | None] = {**os.environ, "PYTHONUNBUFFERED": None, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}


def run(
    *words: str,
    stdin: str | bytes = b"",
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line to its end; what it wrote is UTF-8."""
    done = subprocess.run(
        [*COMMAND, *words],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env=environment(env),
        timeout=DEADLINE,
        check=False,
        **options,
    )
    out, err = done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def write_tiny_model(folder: Path, **keys: Any) -> Path:
    """A model of twelve tokens (a to h and special ones) with a chat template."""
    return tiny_gguf(folder / "tiny.gguf", keys={"tokenizer.chat_template": TEMPLATE} | keys)


class Terminal:
    """A command whose standard input, output and error are a terminal, as under a shell.

    Attributes:
        text: everything it has shown so far.
    """

    def __init__(self, *words: str, env: Mapping[str, str | None] | None = None) -> None:
        self._fd, child = pty.openpty()
        # A session leader that opens a terminal gets it as its controlling one, and with it
        # the SIGINT of Ctrl-C.
        opener = 'exec "$@" <"$TERMINAL" >"$TERMINAL" 2>&1'
        self._process = subprocess.Popen(
            ["sh", "-c", opener, "sh", *COMMAND, *words],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=environment({"TERMINAL": os.ttyname(child), "TERM": "xterm", **(env or {})}),
        )
        self._child = child  # open until the process has opened it itself
        self._seen = 0
        self.text = ""

    def resize(self, columns: int, rows: int) -> None:
        """Gives the terminal another size, as dragging its window does."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def modes(self) -> list[Any]:
        """How the terminal treats what is typed and shown, as `termios.tcgetattr` has it."""
        return termios.tcgetattr(self._child)

    def end(self) -> None:
        """Sends SIGTERM to the command."""
        self._process.send_signal(signal.SIGTERM)

    def type(self, keys: str) -> None:
        """Types keys; "\\n" is Enter, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until something matches in what was shown since the last match."""
        found = self._find(pattern, DEADLINE)
        if found is None:
            raise AssertionError(f"{pattern!r} never came; the terminal shows:\n{self.text}")
        return found

    def press_until(self, keys: str, pattern: str) -> re.Match[str]:
        """Presses keys every other second until something matches, as a person would: at a
        prompt CPython notices a signal only while it sleeps, so one may pass unnoticed."""
        for _ in range(5):
            self.type(keys)
            found = self._find(pattern, 2.0)
            if found is not None:
                return found
        return self.wait_for(pattern)

    def wait_for_exit(self) -> int:
        """The exit code, once the command has ended; the rest of its output is in `text`."""
        deadline = time.monotonic() + DEADLINE
        while self._running:
            if time.monotonic() > deadline:
                raise AssertionError(f"it doesn't end; the terminal shows:\n{self.text}")
            self._read(0.05)
        while self._read(0.05):
            pass
        return self._process.returncode

    def _find(self, pattern: str, seconds: float) -> re.Match[str] | None:
        expression = re.compile(pattern, re.DOTALL)
        deadline = time.monotonic() + seconds
        while (found := expression.search(self.text, self._seen)) is None:
            if time.monotonic() > deadline or not (self._read(0.1) or self._running):
                return None
        self._seen = found.end()
        return found

    @property
    def _running(self) -> bool:
        return self._process.poll() is None

    def _read(self, seconds: float) -> bool:
        """Takes in what is shown within `seconds`; whether there was anything."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        data = os.read(self._fd, 65536)
        self.text += data.decode("utf-8", errors="replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._child)
        os.close(self._fd)
