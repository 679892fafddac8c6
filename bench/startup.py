"""Time from the start of a process to the first token, with a model that is in the cache.

    python bench/startup.py [--model smollm2-135m] [--repeats 5] [--option weights=int8 ...]
    python bench/startup.py --builds [--model qwen2.5-coder-0.5b]

Each repetition is a new Python process that imports the package, loads the model and
streams one token of a short prompt. The clock starts before the process does. Prints the
median of each phase and their sum, and writes everything to
bench/results/startup-<time>.json. A first, unmeasured run fills the caches (the model
file, compiled bytecode), as they are on every start but the first.

With --builds the model is built into a temporary folder, and starts from its checkpoint and
from the build take turns. Otherwise a cached build is not used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PROMPT = "The capital of France is"

# What the process does; the wall clock is the only one that both processes share.
CHILD = """
import time
marks = [("start interpreter", time.time())]
import json, sys
model, options, prompt = json.loads(sys.argv[1])
from trimaran import LLM, SamplingParams
from trimaran.engine.factory import Phases
marks.append(("import trimaran", time.time()))
phases = Phases()
llm = LLM(model, phases=phases, **options)
loaded = time.time()
for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=1)):
    if delta.token_ids:
        first = time.time()
llm.close()
print(json.dumps({"marks": marks, "load": phases.seconds, "loaded": loaded, "first": first}))
"""


def start_once(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase of one start, in order, and their sum as "total"."""
    command = [sys.executable, "-c", CHILD, json.dumps([model, options, PROMPT])]
    begin = time.time()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    phases = {}
    last = begin
    for name, moment in told["marks"]:
        phases[name] = moment - last
        last = moment
    phases.update(told["load"])
    phases["start engine"] = told["loaded"] - last - sum(told["load"].values())
    phases["first token"] = told["first"] - told["loaded"]
    phases["total"] = told["first"] - begin
    return phases


def build(model: str, options: dict[str, Any], folder: str) -> None:
    """Builds the model into `folder` with the options that a build has."""
    command = [sys.executable, "-m", "trimaran", "build", model, "-o", folder]
    for name in ("weights", "isa"):
        if name in options:
            command += [f"--{name}", str(options[name])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compare(models: dict[str, str], options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """By name, the starts of several models that take turns."""
    for model in models.values():
        start_once(model, options)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            runs[name].append(start_once(model, options))
    return runs


def report(name: str, runs: list[dict[str, float]]) -> None:
    print(name)
    for phase in runs[0]:
        values = [run[phase] for run in runs]
        spread = f"{min(values):.3f}–{max(values):.3f}"
        print(f"  {phase:20} {statistics.median(values):7.3f} s  ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--builds", action="store_true", help="start from a build as well")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the engine"
    )
    args = parser.parse_args()
    options: dict[str, Any] = dict(item.split("=", 1) for item in args.option)
    options = {name: int(v) if v.isdigit() else v for name, v in options.items()}
    options["build_cache"] = False
    with tempfile.TemporaryDirectory() as folder:
        models = {args.model: args.model}
        if args.builds:
            build(args.model, options, f"{folder}/build")
            models[f"{args.model}, built"] = f"{folder}/build"
        runs = compare(models, options, args.repeats)
    for name, own in runs.items():
        report(name, own)
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"startup-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps({"options": options, "runs": runs}, indent=2))
    print(f"written to {target.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
