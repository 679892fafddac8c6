"""What is measured: prompts, lengths, and the figure that comes out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.worker import Worker


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload.

    Attributes:
        unit: of its figure.
        more_is_better: whether a higher figure is the faster engine.
        requests: how many at once; 1 is streamed.
        shared: tokens of the prompt that all requests have in common.
        own: tokens of the prompt that are each request's own.
        outputs: (least, most) tokens a request generates, drawn evenly.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool
    requests: int
    shared: int
    own: int
    outputs: tuple[int, int]

    @property
    def longest(self) -> int:
        return self.shared + self.own + self.outputs[1]

    def at_most(self, requests: int) -> Scenario:
        """The same with fewer requests at once."""
        if self.requests <= requests:
            return self
        return Scenario(
            self.name,
            self.title.replace(str(self.requests), str(requests), 1),
            self.unit,
            self.more_is_better,
            requests,
            self.shared,
            self.own,
            self.outputs,
        )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "a", "one stream, 128 → 128: time per output token", "ms", False, 1, 0, 128, (128, 128)
        ),
        Scenario(
            "b", "one cold prompt of 1,024: time to first token", "ms", False, 1, 0, 1024, (1, 1)
        ),
        Scenario("c1", "32 × (256 → 128): output", "tok/s", True, 32, 0, 256, (128, 128)),
        Scenario("c2", "64 × (256 → 16..256): output", "tok/s", True, 64, 0, 256, (16, 256)),
        Scenario(
            "d", "32 × (1,024 shared + 64 → 32): wall time", "s", False, 32, 1024, 64, (32, 32)
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one repetition, the same for every engine."""

    prompts: list[list[int]]
    tokens: list[int]


class Loads:
    """Different prompts at every repetition, so that no cache knows them beforehand."""

    def __init__(self, vocabulary: Sequence[int], seed: int) -> None:
        """`vocabulary`: ids of a text's words, which prompts are drawn from."""
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def of(self, scenario: Scenario) -> Load:
        draw = self._random
        shared = draw.choices(self._vocabulary, k=scenario.shared)
        prompts = [
            shared + draw.choices(self._vocabulary, k=scenario.own)
            for _ in range(scenario.requests)
        ]
        low, high = scenario.outputs
        # The same lengths at every repetition, in another order.
        count = scenario.requests
        tokens = [low + (high - low) * i // max(1, count - 1) for i in range(count)]
        draw.shuffle(tokens)
        return Load(prompts, tokens)


def run(worker: Worker, scenario: Scenario, load: Load) -> float:
    """One figure in the scenario's unit."""
    if scenario.requests == 1:
        answer = worker.ask({"task": "stream", "prompt": load.prompts[0], "tokens": load.tokens[0]})
        return 1e3 * float(answer["ttft" if load.tokens[0] == 1 else "tpot"])
    answer = worker.ask({"task": "batch", "prompts": load.prompts, "tokens": load.tokens})
    seconds = float(answer["seconds"])
    return seconds if scenario.unit == "s" else answer["tokens"] / seconds


def shares_of_limit(
    scenario: Scenario, value: float, about: Mapping[str, Any], limits: Mapping[str, float]
) -> dict[str, float]:
    """How near `value` comes to what the machine allows: 1 can't be surpassed.

    Decode (a, c1): bytes of weights and KV a step / bandwidth, over the time of a step; the
    KV is that of the mean context, halfway through the output. In c1 the time of the
    prefill counts against the engine. Prefill (b): operations of the linear layers / peak.

    Args:
        about: of the engine, whose "weight_bytes" and "kv_bytes_per_token" are needed.
        limits: "bandwidth" in GB/s over the bytes read, and "int8" and "bf16" in GOP/s.
    """
    if scenario.name in ("a", "c1") and {"weight_bytes", "kv_bytes_per_token"} <= about.keys():
        step = value / 1e3 if scenario.name == "a" else scenario.requests / value
        context = scenario.shared + scenario.own + scenario.outputs[1] / 2
        needed = about["weight_bytes"] + about["kv_bytes_per_token"] * scenario.requests * context
        return {"bandwidth": needed / (limits["bandwidth"] * 1e9) / step}
    if scenario.name == "b" and "linear_parameters" in about:
        operations = 2 * about["linear_parameters"] * scenario.own
        return {
            type: operations / (limits[type] * 1e9) / (value / 1e3)
            for type in ("int8", "bf16")
            if limits.get(type)
        }
    return {}
