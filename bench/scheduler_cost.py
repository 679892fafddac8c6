"""What a step of scheduling costs, by the number of running sequences.

    python bench/scheduler_cost.py                 # microseconds a step, schedule and commit
    python bench/scheduler_cost.py --model smollm2-135m --throughput
                                                   # tokens/s by max_num_seqs, on the real model

The first table needs no model: each sequence decodes one token a step, with contexts of 200 to
300 tokens. A step's time is the median of many steps, so that of the rare step in which many
sequences fill a block at once doesn't count double; `worst` is the 99th percentile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from trimaran.cache.manager import KVCacheManager
from trimaran.core.clock import SystemClock
from trimaran.core.config import EngineConfig
from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams
from trimaran.schedule.scheduler import Scheduler

SIZES = (1, 32, 256, 1024, 4096)


def decoding(count: int, options: dict[str, Any]) -> Scheduler:
    """A scheduler with `count` sequences whose prompts are computed."""
    config = EngineConfig(
        max_num_seqs=count, max_num_batched_tokens=min(1 << 20, max(2048, 320 * count)), **options
    )
    kv = KVCacheManager(count * 40 + 40, config.block_size, config.prefix_cache)
    scheduler = Scheduler(config, kv, SystemClock())
    for number in range(count):
        length = 200 + number % 100
        prompt = [(number * 7919 + place) % 32000 for place in range(length)]
        request = Request(str(number), prompt, SamplingParams(max_tokens=300))
        scheduler.add(Sequence(request, 0, list(prompt)))
    while scheduler.num_waiting or any(s.computed < s.total - 1 for s in scheduler.running()):
        advance(scheduler)
    return scheduler


def advance(scheduler: Scheduler) -> tuple[float, float]:
    """One step with a token for each that samples; (seconds of schedule, of commit)."""
    begin = time.perf_counter()
    step = scheduler.schedule()
    scheduled = time.perf_counter()
    assert step is not None
    tokens = [len(sequence.tokens) % 31991 for sequence, _ in step.sampling()]
    between = time.perf_counter()
    scheduler.commit(step)
    scheduler.sampled(step, tokens)
    committed = time.perf_counter()
    for (sequence, _), token in zip(step.sampling(), tokens, strict=True):
        sequence.tokens.append(token)
    return scheduled - begin, committed - between


def measure(count: int, steps: int, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    scheduler = decoding(count, options)
    times = [advance(scheduler) for _ in range(steps)]
    return [1e6 * t for t, _ in times], [1e6 * t for _, t in times]


def print_cost(steps: int, options: dict[str, Any]) -> None:
    print(f"{'running':>8} {'schedule us':>12} {'worst':>8} {'commit us':>10} {'worst':>8}"
          f" {'ns a sequence':>14}")  # fmt: skip
    for count in SIZES:
        schedule, commit = measure(count, steps, options)
        middle, other = statistics.median(schedule), statistics.median(commit)
        print(f"{count:8} {middle:12.1f} {percentile(schedule):8.1f} {other:10.1f}"
              f" {percentile(commit):8.1f} {1e3 * (middle + other) / count:14.0f}")  # fmt: skip


def percentile(values: list[float], share: float = 0.99) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def print_throughput(model: str, requests: int, output: int, seats: list[int]) -> None:
    """Tokens/s of the whole engine when `max_num_seqs` grows and everything else stays."""
    from trimaran import LLM

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    print(f"{'max_num_seqs':>12} {'tokens/s':>10} {'seconds':>8}")
    for count in seats:
        with LLM(model, max_num_seqs=count, max_model_len=256) as llm:
            prompts = [[(7 * i + j) % 30000 + 300 for j in range(16)] for i in range(requests)]
            llm.generate(prompts[:1], params)
            begin = time.perf_counter()
            llm.generate(prompts, params)
            taken = time.perf_counter() - begin
        print(f"{count:12} {requests * output / taken:10.0f} {taken:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--seats", type=int, nargs="*", default=[64, 256, 1024])
    args = parser.parse_args()
    if args.throughput:
        print_throughput(args.model, args.requests, args.output, args.seats)
    else:
        print_cost(args.steps, {})


if __name__ == "__main__":
    main()
