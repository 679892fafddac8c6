"""The step cost model predicts the real engine's steps before it has seen them."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

from trimaran import LLM, SamplingParams
from trimaran.schedule.cost_model import StepLoad
from trimaran.schedule.scheduler import ScheduledStep

TOLERANCE = 0.3  # of the median error; a quiet machine has 0.02 for decodes and 0.08 for prefill


def test_steps_of_a_mixed_load_are_predicted(smollm2_path: Path) -> None:
    seen: list[tuple[StepLoad, float, float]] = []
    rng = random.Random(1)
    prompts = [
        [rng.randrange(300, 40000) for _ in range(rng.choice([20, 60, 150, 400]))]
        for _ in range(48)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(4, 40), ignore_eos=True)
        for _ in prompts
    ]
    with LLM(
        smollm2_path, max_num_seqs=24, max_num_batched_tokens=256, max_model_len=512,
        prefix_cache=False,
    ) as llm:  # fmt: skip
        scheduler = llm._core.scheduler
        cost = scheduler.cost

        def observe(step: ScheduledStep, seconds: float) -> None:
            load = StepLoad.of(step.chosen)
            seen.append((load, cost.predict(load), seconds))
            cost.observe(load, seconds)

        scheduler.observe = observe  # type: ignore[method-assign]
        llm.generate(prompts, params)
    late = seen[len(seen) // 3 :]
    for kind in (True, False):
        errors = [
            abs(predicted / taken - 1)
            for load, predicted, taken in late
            if (load.prefill_tokens > 0) == kind
        ]
        assert len(errors) >= 8
        assert statistics.median(errors) < TOLERANCE, f"prefill: {kind}"
    a, b, c, _, _ = cost.coefficients
    assert min(a, b, c) > 0
