"""The time between forwards: from the end of one `Backend.run` to the start of the next.

    python bench/step_gap.py [--running 1 32 256] [--pairs 3] [--against PATH ...]

So many requests decode at once, each streamed by an asyncio task of its own that reads every
delta. Only steps in which all of them decode count. Reported are the median and the 99th
percentile of the gap, the median of the engine thread's CPU time in it (which other work on the
machine doesn't lengthen), the median length of a forward, and the tokens a second over all.

Three take turns, each run in a process of its own, `--pairs` times in a row; their figures are
over all runs: this version, the same with nothing done while the back end computes ("serial"),
and with --against the `src` folders of other versions.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = str(Path(__file__).resolve().parent.parent / "src")


def measure(
    model: str, running: int, steps: int, temperature: float, serial: bool
) -> dict[str, Any]:
    """Gaps and forwards of one run, seconds; in this process, with whatever is imported."""
    from trimaran import AsyncEngine, SamplingParams
    from trimaran.core.config import EngineConfig
    from trimaran.engine import async_engine
    from trimaran.engine.factory import load_engine

    if serial:
        thread = async_engine.EngineThread
        async_engine.EngineThread = partial(thread, overlap=False)  # type: ignore[misc,assignment]
    config = EngineConfig(max_num_seqs=running, max_model_len=512)
    core = load_engine(model, config).core
    times: list[tuple[int, float, float, float, float]] = []
    run = core.backend.run

    def timed(plan: Any, pooled: Any = None) -> Any:
        begin, own = time.perf_counter(), time.thread_time()
        logits = run(plan, pooled)
        times.append((plan.rows, begin, time.perf_counter(), own, time.thread_time()))
        return logits

    core.backend.run = timed  # type: ignore[method-assign]
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=steps, ignore_eos=True, stop=["\x00\x00"]
    )

    async def one(engine: AsyncEngine, number: int) -> int:
        prompt = [100 + (7 * number + i) % 5000 for i in range(8)]
        return sum([len(delta.token_ids) async for delta in engine.stream(prompt, params)])

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            await asyncio.gather(*(one(engine, i) for i in range(running)))

    asyncio.run(main())
    gaps, forwards, spans, own = [], [], [], []
    for before, after in itertools.pairwise(times[5:]):
        if before[0] == after[0] == running:
            gaps.append(after[1] - before[2])
            forwards.append(after[2] - after[1])
            spans.append(after[2] - before[2])
            own.append(after[3] - before[4])
    return {"gaps": gaps, "forwards": forwards, "spans": spans, "own": own}


def run_in(source: str, args: argparse.Namespace, running: int) -> dict[str, Any]:
    """`measure` in a process that imports the package from `source`, or from here serially."""
    steps = args.steps or {1: 300}.get(running, max(40, 2400 // running))
    serial = source == "serial"
    task = json.dumps([args.model, running, steps, args.temperature, serial])
    done = subprocess.run(
        [sys.executable, __file__, "--task", task],
        env=os.environ | {"PYTHONPATH": HERE if serial else source},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Parses the flags, measures, prints a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=0, help="tokens a request; 0: enough")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--against", nargs="*", default=[], metavar="PATH")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(measure(*json.loads(args.task))))
        return
    sources = [HERE, "serial", *args.against]
    columns = ("gap p50", "gap p99", "gap CPU", "forward", "tokens/s")
    print(f"{'running':>7}", *(f"{name:>9}" for name in columns), " source")
    for running in args.running:
        found: dict[str, list[dict[str, Any]]] = {source: [] for source in sources}
        for pair in range(args.pairs):
            for source in sources if pair % 2 == 0 else reversed(sources):
                found[source].append(run_in(source, args, running))
        for source, runs in found.items():
            gaps = np.concatenate([run["gaps"] for run in runs]) * 1e6
            forwards = np.concatenate([run["forwards"] for run in runs]) * 1e3
            spans = np.concatenate([run["spans"] for run in runs])
            own = np.concatenate([run["own"] for run in runs]) * 1e6
            rate = running / float(np.median(spans))
            print(
                f"{running:>7} {np.median(gaps):>6.0f} us {np.quantile(gaps, 0.99):>6.0f} us"
                f" {np.median(own):>6.0f} us {np.median(forwards):>6.2f} ms {rate:>9.0f}  {source}"
            )


if __name__ == "__main__":
    main()
