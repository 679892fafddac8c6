"""Batch invariance of every pair of weights and KV cache, on every tier that runs here.

A request alone, on one thread, in one piece, without a prefix cache; then with 1 to 4 threads,
in chunks or whole, with a prefix that others computed or its own, with attention that reads
shared pages once or for each sequence: the same tokens and log-probabilities to the bit.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.quantized import quantized_model
from support.tiny import make_core, tiny_model

from trimaran.compute.native.backend import NativeBackend, available_isas
from trimaran.compute.native.built import BuiltModel, build
from trimaran.core.config import KV_FORMATS, WEIGHTS
from trimaran.core.outputs import RequestOutput
from trimaran.core.request import Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import Float32, PooledRows, StepPlan
from trimaran.engine.collector import OutputCollector
from trimaran.models.load import load_checkpoint
from trimaran.models.model import Model
from trimaran.models.tokenizer import Tokenizer

CHUNK = 256  # positions whose pages are shared or not, as a whole
BLOCK = 16
# No width is a multiple of what kernels work in.
RAGGED = {"context_length": 512, "hidden_size": 40, "intermediate_size": 52}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=6, logprobs=2)
LEADER = SamplingParams(
    temperature=0.0, max_tokens=14, logprobs=2, prompt_logprobs=1, ignore_eos=True
)
COMPANY = SamplingParams(temperature=0.7, seed=1, max_tokens=5, ignore_eos=True)


class Watched(NativeBackend):
    """Counts the steps in which sequences share the pages of a whole chunk behind them."""

    shared_steps = 0

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        starts = plan.row_starts
        decodes = (np.diff(starts) == 1) & (plan.positions[starts[:-1]] >= CHUNK)
        tables = plan.block_tables[decodes, : CHUNK // BLOCK]
        self.shared_steps += len({table.tobytes() for table in tables}) < len(tables)
        return super().run(plan, pooled)


class Case:
    """Requests whose prompts share more than a chunk, and an engine to run them on."""

    def __init__(
        self,
        model: Model,
        built: BuiltModel,
        kv: str,
        tokenizer: Tokenizer | None,
        activations: str = "auto",
    ) -> None:
        self.model, self.built, self.kv, self.tokenizer = model, built, kv, tokenizer
        self.activations = activations
        draw = np.random.default_rng(0).integers
        prefix, *tails = (draw(0, 250, n).tolist() for n in (280, 21, 40, 3, 17))
        self.leader = Request("leader", prefix + tails[0], LEADER)
        self.followers = [
            Request("same", prefix + tails[0], GREEDY),
            Request("sampled", prefix + tails[1], SAMPLED),
            Request("other", prefix + tails[2], COMPANY),
            Request("stranger", tails[3] * 3, COMPANY),
        ]

    def run(
        self,
        requests: list[Request],
        later: list[Request],
        grouped: bool,
        threads: int = 1,
        **options: Any,
    ) -> tuple[dict[str, RequestOutput], Watched]:
        """`later` come when the first request has its first token."""
        backend = Watched(self.built, kv=self.kv, activations=self.activations, threads=threads)
        core = make_core(
            backend, blocks=160, block_size=BLOCK, model=self.model, tokenizer=self.tokenizer,
            **options,
        )  # fmt: skip
        backend.group_prefixes(grouped)
        collectors = {
            r.id: OutputCollector(r.id, None, r.prompt, r.params.n) for r in requests + later
        }
        for request in requests:
            core.add(request)
        while core.has_work or later:
            for delta in core.step():
                collectors[delta.request_id].add(delta)
                for request in later:
                    core.add(request)
                later = []
        backend.close()
        return {name: collector.result() for name, collector in collectors.items()}, backend

    def alone(self) -> dict[str, RequestOutput]:
        found = {}
        for request in (self.leader, *self.followers[:2]):
            found |= self.run([request], [], grouped=False, prefix_cache=False)[0]
        return found

    def check(
        self, expected: dict[str, RequestOutput], prefix_cache: bool, grouped: bool, **options: Any
    ) -> None:
        outputs, backend = self.run(
            [self.leader], list(self.followers), grouped, prefix_cache=prefix_cache, **options
        )
        for name, wanted in expected.items():
            same(outputs[name], wanted)
        # What is compared did happen.
        assert outputs["leader"].cached_tokens == 0
        hit = outputs["same"].cached_tokens
        assert (hit >= CHUNK and backend.shared_steps > 1) if prefix_cache else hit == 0
        assert prefix_cache or backend.shared_steps == 0


def same(output: RequestOutput, expected: RequestOutput) -> None:
    got, wanted = output.outputs[0], expected.outputs[0]
    assert got.token_ids == wanted.token_ids
    assert got.logprobs == wanted.logprobs  # floats compared exactly
    assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_way_to_the_same_tokens(isa: str, kv: str, weights: str) -> None:
    if weights == "as-is":
        model = quantized_model("Q4_1", context_length=512)
    else:
        model = tiny_model(5, **RAGGED)
    case = Case(model, build(model, weights, isa), kv, None)
    expected = case.alone()
    ways = product([1, 2, 3, 4], [2048, 37], [(True, True), (True, False), (False, True)])
    for threads, budget, (prefix_cache, grouped) in ways:
        case.check(expected, prefix_cache, grouped, threads=threads, max_num_batched_tokens=budget)


@pytest.fixture(scope="module")
def real(smollm2_path: Any) -> tuple[Model, Tokenizer]:
    checkpoint = load_checkpoint(smollm2_path)
    return checkpoint.model, checkpoint.tokenizer()


@pytest.mark.parametrize(
    ("weights", "kv", "ways"),
    [
        ("as-is", "int8", [(2, 2048, True, True), (3, 61, True, False)]),
        ("int4", "bf16", [(2, 61, True, True), (4, 2048, False, True)]),
        ("int4", "int8", [(3, 2048, True, True)]),
        ("bf16", "int8", [(2, 61, True, True)]),
        ("int8", "int8", [(2, 2048, True, True)]),
        ("as-is", "bf16", [(3, 61, True, True)]),
    ],
)
def test_on_the_real_model(
    real: tuple[Model, Tokenizer],
    weights: str,
    kv: str,
    ways: list[tuple[int, int, bool, bool]],
) -> None:
    model, tokenizer = real
    case = Case(model, build(model, weights, "auto"), kv, tokenizer)
    expected = case.alone()
    for threads, budget, prefix_cache, grouped in ways:
        case.check(expected, prefix_cache, grouped, threads=threads, max_num_batched_tokens=budget)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(
    ("kind", "activations"),
    [("Q4_1", "int8"), ("Q4_K", "int8"), ("Q6_K", "int8"), ("Q4_K", "auto"), ("Q6_K", "auto")],
)
def test_block_types_and_bits_of_activations(isa: str, kind: str, activations: str) -> None:
    model = quantized_model(kind, context_length=512)
    case = Case(model, build(model, "as-is", isa), "int8", None, activations)
    expected = case.alone()
    for threads, budget, prefix_cache, grouped in [(2, 37, True, True), (3, 2048, False, True)]:
        case.check(expected, prefix_cache, grouped, threads=threads, max_num_batched_tokens=budget)


def test_with_activations_in_8_bits_on_the_real_model(real: tuple[Model, Tokenizer]) -> None:
    model, tokenizer = real
    case = Case(model, build(model, "as-is", "auto"), "int8", tokenizer, "int8")
    case.check(case.alone(), True, True, threads=2, max_num_batched_tokens=61)
