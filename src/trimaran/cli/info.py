"""`trimaran info`: what Trimaran runs on here, and with what."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trimaran import __version__
from trimaran.cli.calibration import lines, measure, model_limits
from trimaran.cli.loading import add_model_flags, load_llm, send_log_to_terminal
from trimaran.cli.options import engine_options
from trimaran.cli.parser import EXIT_CODES, Parser
from trimaran.cli.terminal import StartupReport
from trimaran.core.errors import ConfigError

PACKAGES = ("numpy", "tokenizers", "gguf", "jinja2", "huggingface_hub")

EPILOG = f"""\
examples:
  trimaran info
  trimaran info --model smollm2-135m --weights int8
  trimaran info --calibrate
  trimaran info --calibrate --model smollm2-135m
  trimaran info --json

With a model it is loaded as the other commands would load it, and its back end, kernels and
sizes are told as well. With --calibrate the memory's read bandwidth and the peak of each
instruction set are measured, for some seconds; with a model too, what they allow it at most.

{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran info [OPTION ...]",
        description="Says which CPU, instruction set, threads and kernels are in use.",
        epilog=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the machine's bandwidth and peaks"
    )
    add_model_flags(parser, default=None)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code of the command.

    Raises:
        TrimaranError: what is wrong with the options or the model.
    """
    if args.model is None and engine_options(args):
        raise ConfigError(
            "options of the engine say something about a model that is loaded; add --model"
        )
    send_log_to_terminal(args.verbose)
    about = about_machine()
    if args.model is not None:
        with load_llm(args, StartupReport(args.verbose)) as llm:
            about["model"] = {
                "path": str(llm.path),
                "max_model_len": llm.max_model_len,
                "backend": llm.describe(),
            }
    text = list(_lines(about))
    if args.calibrate:
        text += _calibrate(about)
    print(json.dumps(about, indent=2, ensure_ascii=False) if args.json else "\n".join(text))
    return 0


def _calibrate(about: dict[str, Any]) -> list[str]:
    """Adds what is measured to `about`; the lines that say it."""
    calibration = measure(about)
    about["calibration"] = calibration.to_json()
    limits = model_limits(calibration, about["model"]) if "model" in about else None
    if limits is not None:
        about["model"]["limits"] = asdict(limits)
    return list(lines(calibration, limits))


def about_machine() -> dict[str, Any]:
    """Everything that doesn't depend on a model, as JSON values."""
    from trimaran.compute import native
    from trimaran.compute.processors import usable_processors
    from trimaran.engine.memory import available_bytes
    from trimaran.models.store import cache_folder

    isas: list[str] = []
    if native.is_available():
        from trimaran.compute.native.backend import available_isas

        isas = available_isas()
    return {
        "trimaran": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "threads": usable_processors(),
        "memory_available": available_bytes(),
        "native": {
            "available": native.is_available(),
            "reason": None if native.is_available() else native.unavailable_reason(),
            "instruction_sets": isas,
            "chosen": isas[-1] if isas else None,
        },
        "packages": {name: _installed(name) for name in PACKAGES},
        "cache": str(cache_folder()),
    }


def cpu_model() -> str:
    """The processor's name, as the system knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(about: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A line a value that is there; what is nested is indented."""
    for key, value in about.items():
        name = f"{indent}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping):
            yield name
            yield from _lines(value, indent + "  ")
        else:
            yield f"{name:<24} {_shown(key, value)}"


def _shown(key: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key.endswith("_bytes") or key == "memory_available"):
        return f"{value / 2**20:,.0f} MiB"
    return str(value)
