"""One engine in a process of its own, told what to run over stdin, answering on stdout.

Each line in is a JSON object with a "task"; each line out is its result.

    {"task": "describe"}                                         -> what it is
    {"task": "stream", "prompt": [ids], "tokens": n}             -> {"ttft": s, "tpot": s}
    {"task": "batch", "prompts": [[ids], ...], "tokens": [n, ...]} -> {"seconds": s, "tokens": n}

Started by `peers/worker.py` with the interpreter of the engine's environment. Engines are
timed by the same code, where a caller gets the tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.engines.base import Engine, Settings

ENGINES = {
    "trimaran": ("trimaran_engine", "TrimaranEngine"),
    "llama.cpp": ("llama_cpp_engine", "LlamaCppEngine"),
    "vllm": ("vllm_engine", "VllmEngine"),
    "openvino": ("openvino_engine", "OpenVinoEngine"),
    "transformers": ("transformers_engine", "TransformersEngine"),
}


def perform(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    """The result of one task."""
    task = order["task"]
    if task == "describe":
        return engine.describe()
    tokens = order["tokens"]
    start = time.perf_counter()
    if task == "stream":
        arrivals = engine.stream(order["prompt"], tokens)
        _expect(arrivals.tokens, tokens)
        pause = (arrivals.last - arrivals.first) / max(1, tokens - 1)
        return {"ttft": arrivals.first - start, "tpot": pause}
    if task == "batch":
        count = engine.batch(order["prompts"], tokens)
        seconds = time.perf_counter() - start
        _expect(count, sum(tokens))
        return {"seconds": seconds, "tokens": count}
    raise SystemExit(f"unknown task '{task}'")


def _expect(count: int, wanted: int) -> None:
    if count != wanted:
        raise SystemExit(f"{count} tokens came out, {wanted} were asked for")


def make_engine(name: str, model: str, settings: Settings, options: dict[str, Any]) -> Engine:
    module, cls = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(f"peers.engines.{module}"), cls)(
        model, settings, options
    )
    if options:
        raise SystemExit(f"{name} has no options {sorted(options)}")
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON of Settings")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object")
    args = parser.parse_args()
    # What a library prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    engine = make_engine(args.engine, args.model, Settings(**args.settings), args.options)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers)
    for line in sys.stdin:
        print(json.dumps(perform(engine, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
