"""The presets on five workloads: what each policy does, by simulation and on the real engine.

    python bench/policies.py                     simulation, with costs learnt on this machine
    python bench/policies.py --real              and the real engine on shorter traces
    python bench/policies.py --plot docs/policies.svg

Lengths, arrivals and shared prefixes come from the traces in --data (Azure 2023, Mooncake),
scaled down to what a small model on a CPU serves. Each workload's arrivals are spread so that
the machine is busy for --load of the time if everything is reused that can be.
The cost of a step is what the engine's own cost model learns in a run of mixed requests here,
or --cost a,b,c,d,e.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from trimaran import LLM, SamplingParams
from trimaran.core.config import EngineConfig
from trimaran.core.slo import BATCH, INTERACTIVE, STANDARD
from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.factory import load_engine
from trimaran.simulate.backends import PlanCost
from trimaran.simulate.replay import Report, simulate
from trimaran.simulate.trace import TraceRequest, spread

PRESETS = {
    "vllm": {},
    "sglang": {},
    "trtllm": {},
    "fastertransformer": {},
    "vllm + radix": {"preset": "vllm", "index": "radix"},
    "vllm + weighted-shortest": {"preset": "vllm", "order": "weighted-shortest"},
    "vllm + fine": {"preset": "vllm", "chunking": "fine"},
}
MODEL = "smollm2-135m"
MAX_LEN = 2048
VOCABULARY = 40_000
Workload = Callable[[Path, int], list[TraceRequest]]


# ---------------------------------------------------------------------- workloads


def _tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(100, VOCABULARY, max(1, count)).tolist())


def _azure(data: Path, name: str, count: int) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) of the first requests of an Azure trace."""
    found = []
    with open(data / name) as file:
        for row in csv.DictReader(file):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            found.append((when, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            if len(found) == count:
                break
    return [(when - found[0][0], prompt, output) for when, prompt, output in found]


def multi_turn(data: Path, count: int) -> list[TraceRequest]:
    """Mooncake's conversations: each turn begins with the turns before. Lengths by 1/16, so
    that a shared piece of 512 tokens becomes 32."""
    pieces: dict[int, tuple[int, ...]] = {}
    rng = np.random.default_rng(1)
    trace: list[TraceRequest] = []
    with open(data / "mooncake-conversation.jsonl") as file:
        for line in file:
            row = json.loads(line)
            length = row["input_length"] // 16
            if not 1 <= length <= MAX_LEN - 130:
                continue
            prompt: tuple[int, ...] = ()
            for piece in row["hash_ids"]:
                prompt += pieces.setdefault(piece, _tokens(rng, 32))
            output = min(128, max(1, row["output_length"] // 8))
            trace.append(TraceRequest(row["timestamp"] / 1000, prompt[:length], output))
            if len(trace) == count:
                break
    return trace


def system_prompt(data: Path, count: int) -> list[TraceRequest]:
    """One system prompt of 1,024 tokens before every question; Azure's conversations by 1/8."""
    rng = np.random.default_rng(2)
    system = _tokens(rng, 1024)
    return [
        TraceRequest(when, system + _tokens(rng, min(400, prompt // 8)), min(128, output // 4 + 1))
        for when, prompt, output in _azure(data, "azure2023-conv.csv", count)
    ]


def few_shot(data: Path, count: int) -> list[TraceRequest]:
    """Twelve tasks with examples of 512 tokens each, questions of 32, answers of 8, in turns
    as they come."""
    rng = np.random.default_rng(3)
    examples = [_tokens(rng, 512) for _ in range(12)]
    arrivals = _azure(data, "azure2023-conv.csv", count)
    return [
        TraceRequest(when, examples[rng.integers(12)] + _tokens(rng, 32), 8, slo=BATCH)
        for when, _, _ in arrivals
    ]


def long_and_short(data: Path, count: int) -> list[TraceRequest]:
    """Azure's code requests (long prompts, short answers, class batch) among its conversations
    (interactive), both by 1/4."""
    rng = np.random.default_rng(4)
    trace = [
        TraceRequest(when, _tokens(rng, min(1800, prompt // 4)), min(32, output), slo=BATCH)
        for when, prompt, output in _azure(data, "azure2023-code.csv", count // 4)
    ]
    trace += [
        TraceRequest(
            when, _tokens(rng, min(300, prompt // 8)), min(128, output // 2 + 1), slo=INTERACTIVE
        )
        for when, prompt, output in _azure(data, "azure2023-conv.csv", count - count // 4)
    ]
    return _by_arrival(trace)


def burst(data: Path, count: int) -> list[TraceRequest]:
    """Azure's conversations by 1/8, in bursts of 48 at once."""
    rng = np.random.default_rng(5)
    found = _azure(data, "azure2023-conv.csv", count)
    return [
        TraceRequest(
            found[i - i % 48][0],
            _tokens(rng, min(400, prompt // 8)),
            min(128, output // 4 + 1),
            slo=STANDARD,
        )
        for i, (_, prompt, output) in enumerate(found)
    ]


WORKLOADS: dict[str, Workload] = {
    "multi-turn chat": multi_turn,
    "system prompt of 1,024": system_prompt,
    "few-shot": few_shot,
    "long and short": long_and_short,
    "burst": burst,
}


def _by_arrival(trace: list[TraceRequest]) -> list[TraceRequest]:
    return sorted(trace, key=lambda request: request.arrival)


def loaded(trace: list[TraceRequest], cost: PlanCost, load: float) -> list[TraceRequest]:
    """The trace with its arrivals spread so that the machine is busy for `load` of the time, if
    16 requests decode at once and no piece of 32 tokens is computed twice."""
    work = 0.0
    seen: set[tuple[int, ...]] = set()
    for request in trace:
        length = len(request.prompt)
        known = 0
        while known + 32 < length and request.prompt[: known + 32] in seen:
            known += 32
        seen.update(request.prompt[:end] for end in range(32, length + 1, 32))
        work += cost.token * (length - known) + cost.pair * (length**2 - known**2) / 2
        context = length + request.output_tokens / 2
        work += request.output_tokens * (cost.step / 16 + cost.row + cost.position * context)
    duration = max(request.arrival for request in trace) or 1.0
    return spread(trace, work / load / duration)


# ---------------------------------------------------------------------- runs


def learnt_cost() -> PlanCost:
    """Coefficients of the step cost model after some hundred steps of the real engine."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 700, 48).tolist()
    with LLM(MODEL, max_model_len=MAX_LEN, kv_cache_bytes=1 << 30) as llm:
        prompts = [list(_tokens(rng, length)) for length in lengths]
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=int(n))
            for n in rng.integers(8, 64, len(lengths))
        ]
        llm.generate(prompts, params)
        return PlanCost(*llm.step_cost())


def run_real(trace: Sequence[TraceRequest], config: EngineConfig, tokens: int) -> Report:
    """The trace on the real engine, in real time."""
    options = replace(config, kv_cache_bytes=_bytes(tokens))
    return asyncio.run(_run_real(trace, options))


async def _run_real(trace: Sequence[TraceRequest], config: EngineConfig) -> Report:
    loaded_engine = load_engine(MODEL, config)
    report = Report([None] * len(trace))
    async with AsyncEngine(loaded_engine.core) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
        begin = time.monotonic()

        async def ask(i: int, request: TraceRequest) -> None:
            await asyncio.sleep(max(0.0, begin + request.arrival - time.monotonic()))
            params = SamplingParams(
                temperature=0, ignore_eos=True, max_tokens=request.output_tokens
            )
            output = await engine.generate(
                list(request.prompt), params, priority=request.priority, slo=request.slo
            )
            report.metrics[i] = output.metrics

        await asyncio.gather(*(ask(i, request) for i, request in enumerate(trace)))
        report.seconds = time.monotonic() - begin
        usage = loaded_engine.core.scheduler.kv.usage()
        report.hit_rate = usage.hit_tokens / max(1, usage.queried_tokens)
        report.objective = sum(metrics.cost or 0.0 for metrics in report.answered)
        report.preemptions = sum(metrics.preemptions for metrics in report.answered)
    return report


def _bytes(tokens: int) -> int:
    return tokens * 30 * 2 * 192 * 2  # 30 layers, K and V, 3 heads of 64, bf16


def engine_config(name: str, **limits: int) -> EngineConfig:
    """The options of one of `PRESETS`."""
    return EngineConfig(**({"preset": name} | PRESETS[name] | {"max_model_len": MAX_LEN} | limits))


# ---------------------------------------------------------------------- output


def row(name: str, report: Report) -> str:
    """A line of the table."""
    output = sum(metrics.output_tokens for metrics in report.answered)
    return (
        f"| {name} | {report.objective / max(1, len(report.answered)):.2f}"
        f" | {report.quantile('ttft', 0.5):.2f} | {report.quantile('ttft', 0.99):.2f}"
        f" | {1000 * report.quantile('tpot', 0.5):.0f} | {1000 * report.quantile('itl', 0.99):.0f}"
        f" | {100 * report.hit_rate:.0f} % | {report.preemptions} | {output / report.seconds:.0f} |"
    )


HEAD = (
    "| policies | cost a request | TTFT p50, s | p99, s | TPOT p50, ms | longest gap p99, ms"
    " | hits | preemptions | tok/s |\n|---|---|---|---|---|---|---|---|---|"
)


def plot(path: Path, reports: dict[str, dict[str, Report]]) -> None:
    """Bars of the objective of each combination, by workload, relative to preset vllm."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.5))
    width = 0.8 / len(PRESETS)
    for i, name in enumerate(PRESETS):
        heights = [found[name].objective / found["vllm"].objective for found in reports.values()]
        axes.bar([k + i * width for k in range(len(reports))], heights, width, label=name)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(reports))], list(reports))
    axes.set_ylabel("objective, relative to preset vllm\n(lower is better)")
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.6)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="FOLDER")
    parser.add_argument("--requests", type=int, default=600, help="of each simulated trace")
    parser.add_argument("--load", type=float, default=0.9, help="share of time that is busy")
    parser.add_argument("--tokens", type=int, default=16_384, help="that the KV cache holds")
    parser.add_argument("--seqs", type=int, default=32, help="max_num_seqs")
    parser.add_argument("--cost", metavar="A,B,C,D,E", help="of a step, in place of learning it")
    parser.add_argument("--real", action="store_true", help="run the real engine too")
    parser.add_argument("--real-requests", type=int, default=48, help="of each real trace")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    cost = PlanCost(*map(float, args.cost.split(","))) if args.cost else learnt_cost()
    parts = (cost.step, cost.row, cost.token, cost.position, cost.pair)
    print("cost of a step: " + ",".join(f"{part:.4g}" for part in parts) + "\n")
    reports: dict[str, dict[str, Report]] = {}
    for title, workload in WORKLOADS.items():
        trace = loaded(workload(args.data, args.requests), cost, args.load)
        lengths = [len(request.prompt) for request in trace]
        outputs = [request.output_tokens for request in trace]
        print(
            f"## {title}\n\n{len(trace)} requests in {trace[-1].arrival:.0f} s; prompts of"
            f" {statistics.median(lengths):.0f} tokens (median, up to {max(lengths)}), outputs of"
            f" {statistics.median(outputs):.0f} (up to {max(outputs)}).\n\n{HEAD}"
        )
        reports[title] = {}
        for name in PRESETS:
            config = engine_config(name, max_num_seqs=args.seqs)
            reports[title][name] = simulate(
                trace, config, cost, cache_tokens=args.tokens, max_model_len=MAX_LEN
            )
            print(row(name, reports[title][name]), flush=True)
        if args.real:
            real(title, workload, cost, args)
        print()
    if args.plot:
        plot(args.plot, reports)


def real(title: str, workload: Workload, cost: PlanCost, args: argparse.Namespace) -> None:
    """The first requests of the workload on the real engine, beside their simulation."""
    trace = loaded(workload(args.data, args.real_requests), cost, args.load)
    print(f"\nThe first {len(trace)} of them, simulated and on the real engine:\n\n{HEAD}")
    for name in ("vllm", "sglang", "trtllm", "fastertransformer"):
        config = engine_config(name, max_num_seqs=args.seqs)
        expected = simulate(trace, config, cost, cache_tokens=args.tokens, max_model_len=MAX_LEN)
        print(row(f"{name}, simulated", expected))
        print(row(f"{name}, real", run_real(trace, config, args.tokens)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
