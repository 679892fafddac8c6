"""What the lower tiers of the KV cache give and cost, on this machine.

    python bench/kv_tiers.py [MODEL]

Time to first token of prompts of 1,000 tokens: computed; found in the pool; found on the disk
by an engine that was started anew; found in host memory by an engine whose pool has given them
up. Then milliseconds of a step of 8 decodes without tiers, with each of them, and with events,
the engines taking turns. Medians, and the quickest. About 40 seconds with the default model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

from trimaran import LLM, SamplingParams

PREFIX, PROMPTS, ROUNDS, DECODES, TOKENS = 1000, 5, 7, 8, 96
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(300, 30000), k=length)


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Milliseconds until it comes."""
    begin = time.perf_counter()
    stream = llm.stream(prompt, SHORT)
    next(stream)
    elapsed = time.perf_counter() - begin
    for _ in stream:
        pass
    return 1e3 * elapsed


def ask(llm: LLM, prompts: list[list[int]], last: int) -> list[float]:
    return [first_token(llm, [*prompt, last]) for prompt in prompts]


def report(name: str, values: list[float]) -> None:
    print(f"{name:28} {statistics.median(values):8.2f} {min(values):8.2f}", flush=True)


def first_tokens(model: str, folder: str) -> None:
    prompts = [random_prompt(seed, PREFIX) for seed in range(PROMPTS)]
    print(f"{'ms to the first token':28} {'median':>8} {'least':>8}")
    for start in range(2):
        with LLM(model, kv_cache_bytes=300 << 20, kv_disk_path=folder) as llm:
            llm.generate(random_prompt(99, 400), SHORT)
            if start == 0:
                report("computed", ask(llm, prompts, 1000))
                report("from the pool", ask(llm, prompts, 1001))
            else:
                report("from the disk, new engine", ask(llm, prompts, 1002))
    block = LLM(model, kv_cache_bytes=64 << 20)
    size = block.describe()["kv_bytes_per_token"]
    block.close()
    pool = size * (PREFIX + 300)
    with LLM(
        model, kv_cache_bytes=pool, kv_host_bytes=300 << 20, max_model_len=PREFIX + 100
    ) as llm:
        for last in (1000, 1001):
            times = ask(llm, prompts, last)
        report("from host memory", times)


def decodes(model: str, folder: str) -> None:
    host, events = {"kv_host_bytes": 600 << 20}, {"kv_events": f"ipc://{folder}/events"}
    disk = {"kv_disk_path": folder}
    kinds = {"without": {}, "host": host, "disk": disk, "events": events}
    kinds["all three"] = host | disk | events | {"kv_events": f"ipc://{folder}/all"}
    engines = {name: LLM(model, kv_cache_bytes=150 << 20, **own) for name, own in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(ROUNDS):
        prompts = [random_prompt(turn * DECODES + i, 32) for i in range(DECODES)]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            engines[name].generate(prompts, LONG)
            times[name].append(1e3 * (time.perf_counter() - begin) / TOKENS)
    print(f"\n{f'ms a step of {DECODES} decodes':28} {'median':>8} {'least':>8}")
    for name, values in times.items():
        report(name, values[1:])
        engines[name].close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        first_tokens(model, folder)
        decodes(model, folder)


if __name__ == "__main__":
    main()
