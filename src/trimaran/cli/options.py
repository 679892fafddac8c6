"""Command-line flags made from the fields of `SamplingParams` and `EngineConfig`.

The dataclasses are the only place where an option is written down: its flag, its type, its
default and its help text (from the class's docstring) follow from there.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from trimaran.core import config
from trimaran.core.config import EngineConfig
from trimaran.core.presets import PRESETS
from trimaran.core.sampling_params import SamplingParams

_CHOICES: dict[str, tuple[object, ...]] = {
    "preset": tuple(PRESETS),
    "backend": config.BACKENDS,
    "weights": config.WEIGHTS,
    "kv": config.KV_CHOICES,
    "activations": config.ACTIVATIONS,
    "isa": config.ISAS,
    "block_size": config.BLOCK_SIZES,
    "index": config.INDICES,
    "order": config.ORDERS,
    "chunking": config.CHUNKINGS,
    "capacity": config.CAPACITIES,
}
_TEXTS = {"kv_disk_path": "PATH", "kv_events": "ENDPOINT"}
_RENAMED: dict[tuple[type, str], str] = {
    (EngineConfig, "seed"): "--engine-seed"
}  # --seed is the request's
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


def add_engine_flags(parser: argparse.ArgumentParser, only: Collection[str] = ()) -> None:
    """A flag for every field of `EngineConfig`, or for those named."""
    names = {field.name for field in fields(EngineConfig)}
    left_out = frozenset(names - set(only)) if only else frozenset[str]()
    _add_flags(parser.add_argument_group("engine"), EngineConfig, {}, left_out)


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, object],
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """A flag for every field of `SamplingParams` that isn't left out.

    Args:
        defaults: what this command takes where neither flag nor request says otherwise.
    """
    _add_flags(parser.add_argument_group("sampling"), SamplingParams, defaults, leave_out)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by field name."""
    return _given(args, EngineConfig)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by field name."""
    given = _given(args, SamplingParams)
    if "stop_token_ids" in given:
        given["stop_token_ids"] = [token for part in given["stop_token_ids"] for token in part]
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def attribute_docs(cls: type) -> dict[str, str]:
    """Field name -> its entry under "Attributes:" in the docstring, on one line."""
    docs: dict[str, str] = {}
    name = ""
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    for line in text.splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            docs[name] = entry[2]
        elif name and line.startswith("     "):
            docs[name] += " " + line.strip()
    return docs


# ---------------------------------------------------------------------- from field to flag


def _add_flags(
    group: Any, cls: type, defaults: Mapping[str, object], leave_out: frozenset[str]
) -> None:
    docs, hints = attribute_docs(cls), get_type_hints(cls)
    for field in fields(cls):
        if field.name not in leave_out:
            default = defaults.get(field.name, _default(field))
            flag = _flag(cls, field.name)
            group.add_argument(
                "--no-" + flag[2:] if default is True else flag,
                dest=_dest(cls, field.name),
                default=argparse.SUPPRESS,
                help=_help(cls, docs.get(field.name, ""), default)
                + ("; may be repeated" if field.name in _LISTS else ""),
                **_kind(cls, field.name, hints[field.name], default),
            )


def _kind(cls: type, name: str, hint: object, default: object) -> dict[str, Any]:
    """How argparse names and reads a field."""
    if name in _LISTS:
        return {"action": "append"} | _LISTS[name]
    if hint is bool:  # one flag, for what isn't the default
        return {"action": "store_false" if default else "store_true"}
    if name == "block_size":
        return {"metavar": "N", "type": lambda text: 0 if text == "auto" else _whole(text)}
    if name in _CHOICES:
        number = isinstance(_CHOICES[name][0], int)
        return {"metavar": "N", "type": _whole} if number else {"metavar": "NAME"}
    if hint is float:
        return {"metavar": "X", "type": _number}
    if float in get_args(hint):
        return {"metavar": "X", "type": _or_none(_number)}
    if name in _TEXTS:
        return {"metavar": _TEXTS[name], "type": _text_or_none}
    read = size if name.endswith("_bytes") else _whole
    metavar = "SIZE" if read is size else "N"
    return {"metavar": metavar, "type": _or_none(read) if type(None) in get_args(hint) else read}


def _help(cls: type, doc: str, default: object) -> str:
    names = {field.name for field in fields(cls)}
    text = re.sub(
        r"`(\w+)`", lambda found: _flag(cls, found[1]) if found[1] in names else found[1], doc
    )
    text = text.removesuffix(".").replace("None", "none").replace("%", "%%")
    if default is True:
        return f"turn off what is on by default: {text}"
    if default is None or default is False or default == () or "default" in text:
        return text
    return f"{text} (default: {default})"


def _flag(cls: type, name: str) -> str:
    return _RENAMED.get((cls, name), "--" + name.replace("_", "-"))


def _dest(cls: type, name: str) -> str:
    return f"{cls.__name__}.{name}"


def _default(field: Field[Any]) -> object:
    return None if field.default is MISSING else field.default


def _given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    values = vars(args)
    names = [field.name for field in fields(cls)]
    return {name: values[_dest(cls, name)] for name in names if _dest(cls, name) in values}


# ---------------------------------------------------------------------- types of values


def size(text: str) -> int:
    """Bytes from "1073741824", "512MiB", "2G" (powers of 1024).

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; give bytes, or as in 512MiB, 2G")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " "))


def _read(text: str, read: Callable[[str], Any], expected: str) -> Any:
    try:
        return read(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' isn't {expected}") from None


def _whole(text: str) -> int:
    return int(_read(text, int, "a whole number"))


def _number(text: str) -> float:
    return float(_read(text, float, "a number"))


def _or_none(read: Callable[[str], float]) -> Callable[[str], float | None]:
    return lambda text: None if text == "none" else read(text)


def _text_or_none(text: str) -> str | None:
    return None if text == "none" else text


def _ids(text: str) -> list[int]:
    return [int(_read(part, int, "a list of token ids as in 1,2")) for part in text.split(",")]


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    expected = f"a token id and an addend as in 42=-1.5, which '{text}' should be"
    return int(_read(token, int, expected)), float(_read(bias, float, expected))


_LISTS: dict[str, dict[str, Any]] = {
    "stop": {"metavar": "TEXT"},
    "stop_token_ids": {"metavar": "ID,...", "type": _ids},
    "logit_bias": {"metavar": "ID=BIAS", "type": _bias},
}
