"""Every instruction set that this CPU has gives the same tokens on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran import LLM, SamplingParams
from trimaran.compute.native.backend import available_isas
from trimaran.core.errors import BackendError
from trimaran.core.outputs import CompletionOutput

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)


def answers_of(path: Path, isa: str, weights: str) -> list[CompletionOutput]:
    with LLM(path, isa=isa, weights=weights, kv_cache_bytes=32 << 20) as llm:
        assert llm.describe()["isa"] == isa
        return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("weights", ["as-is", "int8", "bf16"])
def test_tiers_with_products_in_integers_give_equal_tokens(
    smollm2_path: Path, weights: str
) -> None:
    tiers = [isa for isa in available_isas() if isa != "amx"]
    expected = answers_of(smollm2_path, tiers[-1], weights)
    for isa in tiers[:-1]:
        for answer, wanted in zip(answers_of(smollm2_path, isa, weights), expected, strict=True):
            assert answer.token_ids == wanted.token_ids, isa
            assert answer.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=0.5)


@pytest.mark.parametrize("weights", ["as-is", "int8", "bf16"])
def test_the_best_tier_differs_only_where_tokens_are_about_as_likely(
    smollm2_path: Path, weights: str
) -> None:
    best, next_best = available_isas()[-1], available_isas()[-2]
    others = answers_of(smollm2_path, next_best, weights)
    for answer, other in zip(answers_of(smollm2_path, best, weights), others, strict=True):
        assert answer.logprobs is not None
        pairs = zip(answer.token_ids, other.token_ids, answer.logprobs, strict=True)
        for token, others_token, logprobs in pairs:
            if token != others_token:
                assert logprobs[token].logprob - logprobs[others_token].logprob < 0.1
                break


def test_an_unknown_tier_is_refused(smollm2_path: Path) -> None:
    missing = {"amx", "avx512", "avx2"} - set(available_isas())
    for isa in missing:
        with pytest.raises(BackendError, match=isa):
            LLM(smollm2_path, isa=isa)
    with pytest.raises(BackendError, match="weights is 'int8'"):
        LLM(smollm2_path, backend="reference", weights="int8")
