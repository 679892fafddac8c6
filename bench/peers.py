"""Trimaran beside llama.cpp in one run, on the same machine in the same minutes.

    python bench/peers.py [--repeats 3] [--workloads a,b,c] [--engines ...] [--threads N]

Workloads, all greedy, no prefix reuse:
    a  one stream, prompt of 128 tokens, 128 out: time per output token (TPOT)
    b  one cold prompt of 1,024 tokens: time to first token (TTFT)
    c  32 requests at once, prompts of 256 tokens, 128 out each: output tokens a second

Engines, NAME or NAME:OPTION=VALUE,... :
    trimaran                      options of the engine, e.g. trimaran:weights=int8
    llama.cpp                     the same file; flash_attention=off|auto
    llama.cpp:q4_0=true           the weights requantised to Q4_0, its fastest 4 bits (a
                                  speed to compare with, at a loss of quality)

Each engine has a process of its own, which is stopped (SIGSTOP) while another one runs,
so that no idle thread spins. Runs are interleaved, in the opposite order every other
time. Memory bandwidth and arithmetic are measured before and after, and decode is set
beside its limit: bytes of weights and KV a step / measured read bandwidth.

The table goes to stdout, everything to bench/results/peers-<time>.json.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DEFAULT_ENGINES = (
    "trimaran",
    "llama.cpp:flash_attention=off",
    "llama.cpp:flash_attention=auto",
    "llama.cpp:flash_attention=off,q4_0=true",
)
SEQUENCES = 32
UNITS = {"a": "ms TPOT", "b": "ms TTFT", "c": "tok/s"}
# Prompts are made of words of this text, so that what follows is language and not noise.
WORDS = ROOT / "tests" / "oracle" / "texts" / "prose.txt"


@dataclass
class Worker:
    """An engine's process; stopped while it isn't asked anything."""

    name: str
    process: subprocess.Popen[str]
    load_seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, engine: str, model: str, options: dict[str, Any]) -> Worker:
        command = [sys.executable, str(ROOT / "bench" / "engine_worker.py"), engine, model]
        command += ["--sequences", str(SEQUENCES), "--options", json.dumps(options)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        worker = cls(name, process)
        worker.load_seconds = worker._answer()["load"]
        worker.about = worker._exchange({"task": "describe"})
        worker._pause()
        return worker

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self.process.send_signal(signal.SIGCONT)
        try:
            return self._exchange(order)
        finally:
            self._pause()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def _pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def _exchange(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Prompts:
    """Different prompts of exact lengths, the same for every engine and every run."""

    def __init__(self, tokenizer: Worker, seed: int) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._words = WORDS.read_text(encoding="utf-8").split()

    def of(self, length: int, count: int) -> list[list[int]]:
        prompts = []
        for _ in range(count):
            text = " ".join(self._random.choices(self._words, k=length))
            ids = self._tokenizer.ask({"task": "tokenize", "text": text})["ids"]
            prompts.append(ids[:length])
        return prompts


def parse_engine(spec: str, threads: int) -> tuple[str, dict[str, Any]]:
    """("llama.cpp", {...}) from "llama.cpp:flash_attention=off,q4_0=true"."""
    name, _, tail = spec.partition(":")
    options: dict[str, Any] = {"threads": threads} if threads else {}
    for item in filter(None, tail.split(",")):
        key, _, value = item.partition("=")
        options[key] = json.loads(value) if value in ("true", "false") else value
        if value.isdigit():
            options[key] = int(value)
    return name, options


def calibrate(threads: int, weight_bytes: int) -> dict[str, float]:
    """Of `calibration.py`, in a process that is gone afterwards."""
    command = [sys.executable, str(ROOT / "bench" / "calibration.py")]
    command += ["--weight-bytes", str(weight_bytes)]
    command += ["--threads", str(threads)] if threads else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def run_workload(worker: Worker, workload: str, prompts: list[list[int]]) -> float:
    """One figure in the workload's unit."""
    if workload == "a":
        return 1e3 * worker.ask({"task": "stream", "prompt": prompts[0], "tokens": 128})["tpot"]
    if workload == "b":
        return 1e3 * worker.ask({"task": "stream", "prompt": prompts[0], "tokens": 1})["ttft"]
    done = worker.ask({"task": "batch", "prompts": prompts, "tokens": 128})
    return done["tokens"] / done["seconds"]


def schedule(workers: list[Worker], repeats: int) -> Iterator[Worker]:
    """A B C, C B A, A B C, ..."""
    for i in range(repeats):
        yield from workers if i % 2 == 0 else reversed(workers)


def measure(
    workers: list[Worker], workloads: list[str], repeats: int, prompts: Prompts
) -> dict[str, dict[str, list[float]]]:
    """Figures by workload and engine, one a repetition."""
    figures: dict[str, dict[str, list[float]]] = {}
    shapes = {"a": (128, 1), "b": (1024, 1), "c": (256, SEQUENCES)}
    for worker in workers:  # first use: pages are read, threads are made
        warm_up = {"task": "stream", "prompt": prompts.of(64, 1)[0], "tokens": 8}
        worker.ask(warm_up)
    for workload in workloads:
        length, count = shapes[workload]
        rows = figures[workload] = {worker.name: [] for worker in workers}
        made = prompts.of(length, count)
        for worker in schedule(workers, repeats):
            value = run_workload(worker, workload, made)
            rows[worker.name].append(value)
            print(f"{workload} {worker.name}: {value:.1f} {UNITS[workload]}", file=sys.stderr)
    return figures


def decode_limits(
    worker: Worker, figures: dict[str, dict[str, list[float]]], kv_bytes: int, bandwidth: float
) -> dict[str, float]:
    """Share of the bandwidth limit in decode: 1 is as fast as memory can be read.

    The KV read in a step is that of the mean context, halfway through the output. In (c)
    the time of the prefill counts against the engine.
    """
    contexts = {"a": 128 + 64, "c": SEQUENCES * (256 + 64)}
    sequences = {"a": 1, "c": SEQUENCES}
    shares = {}
    for workload in contexts.keys() & figures.keys():
        value = statistics.median(figures[workload][worker.name])
        step = value / 1e3 if workload == "a" else sequences[workload] / value
        needed = worker.about["weight_bytes"] + kv_bytes * contexts[workload]
        shares[workload] = needed / (bandwidth * 1e9) / step
    return shares


def report(result: dict[str, Any]) -> str:
    """The table: median, and lowest to highest, of each workload."""
    workloads = list(result["figures"])
    heads = [f"{workload} {UNITS[workload]}" for workload in workloads]
    lines = [
        "| engine | " + " | ".join(heads) + " | share of limit a, c |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for name in result["engines"]:
        cells = []
        for workload in workloads:
            values = result["figures"][workload][name]
            middle = statistics.median(values)
            cells.append(f"{middle:.1f} ({min(values):.1f}–{max(values):.1f})")
        limits = result["engines"][name]["share_of_limit"]
        shares = ", ".join(f"{limits[w]:.0%}" if w in limits else "–" for w in ("a", "c"))
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {shares} |")
    for when in ("before", "after"):
        rates = ", ".join(f"{k} {v:.1f}" for k, v in result["calibration"][when].items())
        lines.append(f"calibration {when}: {rates}")
    return "\n".join(lines)


def requantised(path: Path, stack: ExitStack) -> Path:
    """The model with its weights requantised to Q4_0, as a temporary file."""
    sys.path.insert(0, str(ROOT / "tests"))
    import gguf
    from oracle.float_gguf import write_float_gguf

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    target = Path(folder) / f"{path.stem}-requantised.Q4_0.gguf"
    write_float_gguf(path, target, gguf.GGMLQuantizationType.Q4_0)
    return target


def start_workers(
    specs: list[str], model: str, path: Path, threads: int, stack: ExitStack
) -> list[Worker]:
    workers = []
    for spec in specs:
        name, options = parse_engine(spec, threads)
        target = model if name == "trimaran" else str(path)
        if options.pop("q4_0", False):
            target = str(requantised(path, stack))
        worker = Worker.start(spec, name, target, options)
        stack.callback(worker.stop)
        workers.append(worker)
    return workers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a GGUF model")
    parser.add_argument("--engines", nargs="+", default=list(DEFAULT_ENGINES))
    parser.add_argument("--workloads", default="a,b,c", help="of a, b, c")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of every engine; 0: all CPUs")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args()
    from trimaran.models.store import resolve

    path = Path(resolve(args.model))
    with ExitStack() as stack:
        workers = start_workers(args.engines, args.model, path, args.threads, stack)
        tokenizers = [worker for worker in workers if worker.name.startswith("trimaran")]
        if not tokenizers:
            tokenizers = start_workers(["trimaran"], args.model, path, args.threads, stack)
        weight_bytes = tokenizers[0].about["weight_bytes"]
        kv_bytes = tokenizers[0].about["kv_bytes_per_token"]
        before = calibrate(args.threads, weight_bytes)
        figures = measure(
            workers, args.workloads.split(","), args.repeats, Prompts(tokenizers[0], args.seed)
        )
        after = calibrate(args.threads, weight_bytes)
        bandwidth = max(before["read_weights_gb_s"], after["read_weights_gb_s"])
        result = {
            "model": args.model,
            "repeats": args.repeats,
            "calibration": {"before": before, "after": after},
            "figures": figures,
            "engines": {
                worker.name: {
                    "about": worker.about,
                    "load_seconds": worker.load_seconds,
                    "share_of_limit": decode_limits(worker, figures, kv_bytes, bandwidth),
                }
                for worker in workers
            },
        }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"peers-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps(result, indent=2, ensure_ascii=False))
    print(report(result))
    print(f"written to {target.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
