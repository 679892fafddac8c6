"""Loads the model that a command line names, telling what happens meanwhile."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from trimaran.cli.options import add_engine_flags, engine_options
from trimaran.cli.terminal import DownloadReport, StartupReport, say
from trimaran.models.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from trimaran.engine.llm import LLM


def add_model_flags(parser: argparse.ArgumentParser, default: str | None = DEFAULT_MODEL) -> None:
    """--model, --verbose and the engine's options."""
    shown = "" if default is None else f" (default: {default})"
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=default,
        help="a .gguf file, a folder with config.json and safetensors, the folder of a build, a"
        f" known name, or a hub name as owner/name{shown}",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print the phases of the start-up with their times, and what was chosen",
    )
    add_engine_flags(parser)


def load_llm(args: argparse.Namespace, startup: StartupReport) -> LLM:
    """The model of the command line, ready to generate.

    Raises:
        TrimaranError: of the class that names the trouble.
    """
    send_log_to_terminal(args.verbose)
    startup.rest("start Python")
    from trimaran.engine.factory import Phases
    from trimaran.engine.llm import LLM

    startup.rest("import engine")
    phases = Phases(report=startup.phase)
    download = DownloadReport(args.model)
    try:
        llm = LLM(args.model, phases=phases, download_progress=download, **engine_options(args))
    finally:
        download.close()
    startup.rest("start engine")
    return llm


def send_log_to_terminal(verbose: bool) -> None:
    """Warnings of the package go to standard error; with `verbose`, what it chose as well."""
    log = logging.getLogger("trimaran")
    if not any(isinstance(handler, _TerminalHandler) for handler in log.handlers):
        log.addHandler(_TerminalHandler())
    log.setLevel(logging.INFO if verbose else logging.WARNING)


class _TerminalHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(f"trimaran: {level}{record.getMessage()}")
