"""`trimaran models`: what models are known, and which of them lie on this machine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from trimaran.cli.parser import EXIT_CODES, FAILED, Parser
from trimaran.cli.terminal import DownloadReport, human_bytes, say
from trimaran.core.errors import ConfigError, TrimaranError, nearest
from trimaran.models.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from trimaran.models.store import ModelInfo, ModelStore

ACTIONS = {
    "list": "the known models, and whether they are cached",
    "pull": f"fetch models (default: {DEFAULT_MODEL}); a cached one that is sound stays",
    "verify": "hash cached models anew (default: all); a broken one is fetched by the next pull",
    "remove": "delete cached models",
}

EPILOG = f"""\
actions:
{chr(10).join(f"  {name:<8} {text}" for name, text in ACTIONS.items())}

examples:
  trimaran models list
  trimaran models pull qwen2.5-coder-0.5b
  trimaran models verify --json
  trimaran models remove smollm2-135m

A hub name as owner/name can be pulled too; its files lie in the cache of huggingface_hub.
TRIMARAN_CACHE names another folder for the cache than ~/.cache/trimaran.

{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        usage="trimaran models [-h] [--json] ACTION [NAME ...]",
        description="Lists, pulls, verifies and removes the models on this machine.",
        epilog=EPILOG,
    )
    parser.add_argument("action", metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("names", metavar="NAME", nargs="*", help="of models")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code of the command: 1 when one of several models failed.

    Raises:
        ConfigError: there is no such action, or it wants a name.
    """
    if args.action not in ACTIONS:
        tail = nearest(args.action, ACTIONS)
        raise ConfigError(f"there is no action '{args.action}'.{tail} Give {', '.join(ACTIONS)}")
    if args.action == "list" and args.names:
        raise ConfigError("list takes no name; it lists all models")
    if args.action == "remove" and not args.names:
        raise ConfigError("remove wants the name of a model")
    from trimaran.models.store import ModelStore

    store = ModelStore()
    if args.action == "list":
        return _list(store, args.json)
    names = args.names or _default_names(store, args.action)
    act = {"pull": _pull, "verify": _verify, "remove": _remove}[args.action]
    records = []
    for name in names:
        try:
            records.append(act(store, name, args.json))
        except TrimaranError as error:  # the other models don't suffer from it
            say(f"trimaran: {error}")
            failure = {"type": type(error).__name__, "message": str(error)}
            records.append({"name": name, "error": failure})
    if args.json:
        print(json.dumps(records, indent=2, ensure_ascii=False))
    return FAILED if any("error" in record for record in records) else 0


def _default_names(store: ModelStore, action: str) -> list[str]:
    if action == "pull":
        return [DEFAULT_MODEL]
    return [model.name for model in store.list_models() if model.state != "absent"]


def _list(store: ModelStore, as_json: bool) -> int:
    models = store.list_models()
    if as_json:
        print(json.dumps([_record(model) for model in models], indent=2, ensure_ascii=False))
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        size = human_bytes(model.size)
        print(f"{model.name:<{width}}  {model.state:<6}  {size:>8}  {model.description}")
    say(f"The cache is {store.folder}")
    return 0


def _record(model: ModelInfo) -> dict[str, Any]:
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "description": model.description,
        "licence": model.licence,
        "size": model.size,
        "sha256": model.sha256,
        "state": model.state,
        "path": str(model.path),
    }


def _pull(store: ModelStore, name: str, as_json: bool) -> dict[str, Any]:
    report = DownloadReport(name)
    try:
        path = store.pull(name, progress=report)
    finally:
        report.close()
    if not as_json:
        print(f"{name} is in {path}")
    return {"name": name, "path": str(path)}


def _verify(store: ModelStore, name: str, as_json: bool) -> dict[str, Any]:
    sound = store.verify(name)
    if not as_json:
        print(f"{name} is {'sound' if sound else 'broken'}")
    if sound:
        return {"name": name, "sound": True}
    message = f"the file is not what it should be; fetch it again: trimaran models pull {name}"
    say(f"trimaran: {name}: {message}")
    return {"name": name, "sound": False, "error": {"type": "DownloadError", "message": message}}


def _remove(store: ModelStore, name: str, as_json: bool) -> dict[str, Any]:
    freed = store.remove(name)
    if not as_json:
        print(
            f"{name} is removed, {human_bytes(freed)} freed" if freed else f"{name} was not cached"
        )
    return {"name": name, "freed": freed}
