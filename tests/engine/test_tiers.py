"""Every instruction set that this CPU has gives the same tokens on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran import LLM, SamplingParams
from trimaran.compute.native.backend import available_isas
from trimaran.core.errors import BackendError

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0)


@pytest.mark.parametrize("weights", ["as-is", "int8", "bf16"])
def test_equal_tokens_on_every_tier(smollm2_path: Path, weights: str) -> None:
    answers = {}
    for isa in available_isas():
        with LLM(smollm2_path, isa=isa, weights=weights, kv_cache_bytes=32 << 20) as llm:
            assert llm.describe()["isa"] == isa
            answers[isa] = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
    expected = answers.pop(available_isas()[-1])
    for isa, outputs in answers.items():
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.token_ids == wanted.token_ids, isa
            assert output.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=0.5)


def test_an_unknown_tier_is_refused(smollm2_path: Path) -> None:
    missing = {"amx", "avx512", "avx2"} - set(available_isas())
    for isa in missing:
        with pytest.raises(BackendError, match=isa):
            LLM(smollm2_path, isa=isa)
    with pytest.raises(BackendError, match="weights is 'int8'"):
        LLM(smollm2_path, backend="reference", weights="int8")
