"""The argument parser of all commands, and the exit codes they share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from trimaran.core.errors import nearest

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
PIPE_CLOSED = 141  # 128 + SIGPIPE

EXIT_CODES = """\
exit codes:
  0    done
  1    it failed, or one of the requests did; standard error says why
  2    the command line, an option or a sampling parameter is wrong
  130  interrupted by Ctrl-C
  141  the reader of standard output went away

environment:
  TRIMARAN_DEBUG=1  show the traceback of an error
"""


class Parser(argparse.ArgumentParser):
    """Refuses an unknown flag with the nearest known one, and takes no abbreviations."""

    def __init__(self, *, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=usage.partition(" [")[0],
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments in `words`.

        Raises:
            SystemExit: they are wrong, which was said; or they asked for help.
        """
        found, unknown = self.parse_known_args(words)
        for word in unknown:
            if word.startswith("-"):
                flag = word.split("=")[0]
                self.error(f"unknown option '{flag}'.{nearest(flag, self._option_string_actions)}")
        if unknown:
            self.error(f"'{unknown[0]}' is one argument too many; put a text with spaces in quotes")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")
