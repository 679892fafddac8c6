"""Taking turns with other work on the machine."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class TurnRefused(Exception):
    """The command that makes the machine quiet ended by itself."""


class Turns:
    """What is measured in a turn runs while `command` runs something that waits for its end.

    So `flock FILE` lets several benches follow each other, and a script of one's own can stop
    other processes for the length of a turn. Without a command a turn is nothing special.
    """

    def __init__(self, command: str | None) -> None:
        self._command = None if command is None else shlex.split(command)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Begins when the command has begun what it was given; ends it afterwards.

        Raises:
            TurnRefused: the command ended without running it.
        """
        if self._command is None:
            yield
            return
        wait_for_the_end = ["sh", "-c", "echo begun; read line"]
        process = subprocess.Popen(
            [*self._command, *wait_for_the_end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        begun = False
        try:
            if process.stdout.readline().strip() != "begun":
                raise TurnRefused(
                    f"'{shlex.join(self._command)}' didn't run the command it was given: "
                    f"exit status {process.wait()}"
                )
            begun = True
            yield
        finally:
            if not begun:
                process.terminate()  # it was still waiting
            process.stdin.close()
            process.wait()
            process.stdout.close()
