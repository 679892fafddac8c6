"""This project, through `LLM`."""

from __future__ import annotations

import time
from typing import Any

from peers.engines.base import Arrivals, Settings
from trimaran import LLM, SamplingParams

_OPTIONS = ("weights", "kv", "activations", "isa", "block_size", "index", "order")


class TrimaranEngine:
    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        own = {name: options.pop(name) for name in _OPTIONS if name in options}
        self._llm = LLM(
            model,
            max_num_seqs=settings.sequences,
            max_model_len=settings.context,
            threads=settings.threads,
            **own,
        )

    def describe(self) -> dict[str, Any]:
        return self._llm.describe()

    def _params(self, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        times: list[float] = []
        for delta in self._llm.stream(prompt, self._params(tokens)):
            times.extend([time.perf_counter()] * len(delta.token_ids))
        return Arrivals.of(times)

    def batch(self, prompts: list[list[int]], tokens: list[int]) -> int:
        outputs = self._llm.generate(prompts, [self._params(count) for count in tokens])
        return sum(len(output.outputs[0].token_ids) for output in outputs)
