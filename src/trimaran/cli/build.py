"""`trimaran build`: a model made ready for this machine, for fast starts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from trimaran.cli.loading import send_log_to_terminal
from trimaran.cli.options import add_engine_flags, engine_options
from trimaran.cli.parser import EXIT_CODES, Parser
from trimaran.cli.terminal import DownloadReport, StartupReport, human_bytes, say
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError

FLAGS = ("weights", "kv", "isa", "threads")
"""The engine's options that decide what a build holds, or how fast it is made."""

EPILOG = f"""\
examples:
  trimaran build qwen2.5-coder-0.5b
  trimaran build smollm2-135m --weights int8 --kv int8 -o smollm2-int8
  trimaran generate --model smollm2-int8 "Once upon a time"
  trimaran build --list
  trimaran build --clean

A build holds the recorded plan of a model and its weights as the kernels read them, for one
instruction set and one kind of weights, with the tokenizer and the chat template: it needs
no other file. In a folder it may also say how keys and values are held: with --kv, every
start from it does so. Without -o it is kept in the cache, where every command that loads the
model with the same options finds it, whatever its --kv. A cached build whose model changed,
or that another version of Trimaran made, is built again by itself; one in a folder of your
own is refused, and says why.

{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran build [OPTION ...] MODEL",
        description="Packs a model for this machine once, so that later starts only read it.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a .gguf file, a folder with config.json and safetensors, a known name, or a hub"
        " name as owner/name",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="write the build there, not to the cache"
    )
    parser.add_argument("--list", action="store_true", help="list the cached builds")
    parser.add_argument("--clean", action="store_true", help="delete the cached builds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print the phases with their times"
    )
    add_engine_flags(parser, FLAGS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code of the command.

    Raises:
        TrimaranError: what is wrong with the options or the model, or can't be written.
    """
    if (args.model is not None) + args.list + args.clean != 1:
        raise ConfigError("give one of MODEL, --list and --clean")
    if args.model is None and (args.output is not None or engine_options(args)):
        raise ConfigError("--list and --clean are about the cache; they take no other option")
    send_log_to_terminal(args.verbose)
    if args.list:
        return _list(args.json)
    if args.clean:
        return _clean(args.json)
    return _build(args)


def _build(args: argparse.Namespace) -> int:
    startup = StartupReport(args.verbose)
    startup.rest("start Python")
    from trimaran.engine.factory import Phases, build_model

    startup.rest("import engine")
    config = EngineConfig.from_mapping(engine_options(args))
    download = DownloadReport(args.model)
    try:
        place, built = build_model(
            args.model,
            config,
            args.output,
            phases=Phases(report=startup.phase),
            progress=download,
        )
    finally:
        download.close()
    startup.end("end")
    if args.json:
        record = {
            "path": str(place),
            "weights": built.weights,
            "kv": built.kv,
            "isa": built.isa,
            "weight_bytes": built.nbytes,
        }
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        kv = "" if built.kv is None else f"KV {built.kv}, "
        what = f"weights {built.weights}, {kv}{built.isa}, {human_bytes(built.nbytes)}"
        print(f"{args.model} is built in {place} ({what})")
    return 0


def _list(as_json: bool) -> int:
    from trimaran.engine.builds import BuildStore

    store = BuildStore()
    builds = store.list_builds()
    if as_json:
        print(json.dumps([asdict(build) for build in builds], indent=2, ensure_ascii=False))
        return 0
    width = max((len(build.name) for build in builds), default=0)
    for build in builds:
        what = f"{build.weights:<6}  {build.isa:<8}  {human_bytes(build.nbytes):>8}"
        print(f"{build.name:<{width}}  {what}  {build.state}")
    say(f"The cache is {store.folder}")
    return 0


def _clean(as_json: bool) -> int:
    from trimaran.engine.builds import BuildStore

    freed = BuildStore().clean()
    if as_json:
        print(json.dumps({"freed": freed}))
    else:
        print(f"{human_bytes(freed)} freed")
    return 0
