"""The `trimaran` command: picks the subcommand, and turns errors into exit codes.

A subcommand is a module with `make_parser()` and `run(args)`. Only the one that was called
is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from trimaran.cli.parser import EXIT_CODES, FAILED, INTERRUPTED, PIPE_CLOSED, USAGE, Parser
from trimaran.core.errors import ConfigError, ParameterError, TrimaranError, nearest

COMMANDS = {
    "serve": "an OpenAI-compatible server of a model",
    "top": "what a server does at this moment, in the terminal",
    "chat": "talk with a model in the terminal",
    "generate": "answer a prompt, standard input, or a JSONL file of requests",
    "models": "list, pull, verify and remove the models on this machine",
    "build": "pack a model for this machine once, for fast starts",
    "info": "the CPU, instruction set, threads and kernels in use",
}


class Command(Protocol):
    """What a subcommand's module offers."""

    def make_parser(self) -> Parser: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: this process's); returns its exit code.

    Raises:
        SystemExit: after --help, --version, or a usage error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _write_utf8()
    try:
        try:
            return _dispatch(words)
        finally:
            sys.stdout.flush()  # here, not at exit, where a closed pipe could not be told
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except (ConfigError, ParameterError) as error:
        return _fail(str(error), USAGE)
    except TrimaranError as error:
        return _fail(str(error), FAILED)
    except OSError as error:
        if error.filename is None:  # not about a file that the user named: a bug
            raise
        return _fail(f"'{error.filename}': {error.strerror}", FAILED)


def _dispatch(words: list[str]) -> int:
    if words and words[0] in COMMANDS:
        command = cast(Command, importlib.import_module(f"trimaran.cli.{words[0]}"))
        return command.run(command.make_parser().parse(words[1:]))
    top = _top_parser()
    if words and not words[0].startswith("-"):
        top.error(f"unknown command '{words[0]}'.{nearest(words[0], COMMANDS)}")
    top.parse(words)
    top.print_help()
    return 0


def _top_parser() -> Parser:
    from trimaran import __version__

    listed = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        usage="trimaran [-h] [--version] COMMAND ...",
        description=f"Trimaran, an LLM inference engine.\n\ncommands:\n{listed}",
        epilog=f"""\
examples:
  trimaran serve
  trimaran chat
  trimaran generate --chat "Why is the sky blue?" --temperature 0.3
  trimaran generate --input requests.jsonl --output answers.jsonl
  trimaran COMMAND --help

{EXIT_CODES}""",
    )
    parser.add_argument("--version", action="version", version=f"trimaran {__version__}")
    return parser


def _write_utf8() -> None:
    """Text goes out as UTF-8 whatever the locale, with what UTF-8 can't hold escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def _fail(message: str, code: int) -> int:
    """One line on standard error, the traceback before it where it was asked for."""
    if os.environ.get("TRIMARAN_DEBUG", "0") not in ("", "0") and code != INTERRUPTED:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"trimaran: {message}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Nobody reads standard output any more: what Python still flushes goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
