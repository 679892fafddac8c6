"""Lines that a person types, with editing and a history; or those of a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

PROMPT = "> "
HISTORY_LINES = 1000


class LineInput:
    """Where a chat's lines come from.

    Attributes:
        interactive: whether a person is typing: prompts are shown, and Ctrl-C takes back
            the line instead of ending the program.
    """

    def __init__(self, keep_history: bool = True) -> None:
        self.interactive = sys.stdin.isatty()
        self._history = history_file() if self.interactive and keep_history else None
        if self.interactive:
            self._load_history()

    def read(self) -> str | None:
        """The next line without its end; None when there is none any more."""
        if not self.interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        while True:
            try:
                return self._typed()
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves.)", file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return None

    def close(self) -> None:
        """Keeps the history for the next time."""
        if self._history is None:
            return
        import readline

        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)  # what is typed is nobody else's to read
            readline.set_history_length(HISTORY_LINES)
            readline.write_history_file(self._history)

    def _typed(self) -> str:
        if sys.stdout.isatty():
            return input(PROMPT)
        # The answers go into a file or a pipe, which a prompt has no place in.
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _load_history(self) -> None:
        try:
            import readline  # from here on input() edits lines
        except ImportError:  # a Python that was built without it
            self._history = None
            return
        if self._history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._history)


def history_file() -> Path:
    """Where typed lines are kept (XDG base directories: state that persists)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "trimaran" / "chat-history"
