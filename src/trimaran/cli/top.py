"""`trimaran top`: what a server does at this moment, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from trimaran.cli.parser import EXIT_CODES, Parser
from trimaran.cli.top_screen import painted, screen
from trimaran.cli.top_source import ServerUnreachableError, Source
from trimaran.core.errors import ConfigError

EPILOG = f"""\
examples:
  trimaran top
  trimaran top http://gpu-box:8000 --interval 0.5
  trimaran top --once | head -3

q or Ctrl-C ends it. Where standard output is no terminal it prints once.

{EXIT_CODES}"""

TICK_SECONDS = 0.1
"""How soon a key or another size of the terminal is noticed."""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran top [URL] [OPTION ...]",
        description="Shows a server's batch of each step, KV cache, queue, latency and requests.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default="http://127.0.0.1:8000",
        help="of the server (default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="between two pictures, 0.1 to 3600 (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--api-key", metavar="KEY", help="where the server asks for one")
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code of the command: 0 once it was ended.

    Raises:
        ConfigError: a bad URL or interval.
        ServerUnreachableError: with --once, or without a terminal.
    """
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval is {args.interval}; give 0.1 to 3600 seconds")
    source = Source(args.url, args.api_key)
    if args.once or not sys.stdout.isatty():
        size = shutil.get_terminal_size((100, 40))
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        rows = 10_000 if not sys.stdout.isatty() else size.lines
        print("\n".join(screen(source.view(), size.columns, rows, color)))
        return 0
    _watch(source, args.interval)
    return 0


def _watch(source: Source, interval: float) -> None:
    color = "NO_COLOR" not in os.environ
    with _whole_screen(), contextlib.suppress(KeyboardInterrupt):
        while True:
            due = time.monotonic() + interval
            try:
                view, trouble = source.view(), ""
            except ServerUnreachableError as error:
                view, trouble = None, str(error)
            size = None
            while time.monotonic() < due:
                now = shutil.get_terminal_size()
                if now != size:
                    size = now
                    if view is None:
                        said = (trouble, "trying again; q ends")
                        lines = [painted([(each, "")], now.columns, False) for each in said]
                    else:
                        lines = screen(view, now.columns, now.lines, color)
                    _draw(lines)
                if _pressed(min(TICK_SECONDS, max(0.0, due - time.monotonic()))) in "qQ\x04":
                    return


def _draw(lines: list[str]) -> None:
    """Over what is there, and not after erasing it, so that nothing flickers."""
    rows = "".join(f"\x1b[{i};1H{line}\x1b[K" for i, line in enumerate(lines, 1))
    sys.stdout.write(f"{rows}\x1b[J")
    sys.stdout.flush()


def _pressed(timeout: float) -> str:
    """A key that was pressed within so many seconds; a space where none was."""
    if not sys.stdin.isatty():
        time.sleep(timeout)
        return " "
    if not select.select([sys.stdin], [], [], timeout)[0]:
        return " "
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") or "q"


@contextlib.contextmanager
def _whole_screen() -> Iterator[None]:
    """The terminal's second screen without a cursor, keys as they are pressed; what was there
    is back at the end, however it comes."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    handler = signal.signal(signal.SIGTERM, _ended)
    try:
        if before is not None:
            tty.setcbreak(sys.stdin.fileno())
        sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[?7l")
        sys.stdout.flush()
        yield
    finally:
        sys.stdout.write("\x1b[?7h\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)


def _ended(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
