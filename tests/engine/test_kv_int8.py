"""The engine with its KV cache in int8, on the real model: the same bits in any company, and
the tokens' probabilities near those of a cache in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimaran import LLM, RequestOutput, SamplingParams
from trimaran.core.config import EngineConfig
from trimaran.core.errors import BackendError
from trimaran.engine.factory import make_backend
from trimaran.models.load import load_checkpoint

TEXT = (
    "The harbour master kept two ledgers. In the first he wrote the name of every ship, the"
    " hour of its arrival and the draught at which it lay; in the second, which nobody else had"
    " read, he noted what each captain had said of the weather, and whether it had been true."
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, prompt_logprobs=0)
KV_BYTES = 30 * 2 * 3 * (64 + 4)  # a token in 30 layers, K and V, 3 heads of 64 and a scale


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, **({"kv": "int8", "kv_cache_bytes": 2048 * KV_BYTES} | options))


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> Iterator[RequestOutput]:
    with engine(smollm2_path, prefix_cache=False, threads=1) as llm:
        yield llm.generate(TEXT, PARAMS)[0]


def same(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 3, "block_size": 32},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"kv_cache_bytes": 20 * 16 * KV_BYTES},  # too little: sequences are preempted
    ],
    ids=["threads", "chunks", "preempted"],
)
def test_company_changes_no_bit(
    smollm2_path: Path, alone: RequestOutput, options: dict[str, Any]
) -> None:
    prompts = [TEXT[: 40 * i] + f"Entry {i}: " + "tide " * (i * 5 % 17) for i in range(7)]
    prompts.insert(5, TEXT)
    others = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)
    with engine(smollm2_path, **options) as llm:
        outputs = llm.generate(prompts, [PARAMS if p is TEXT else others for p in prompts])
        same(outputs[5], alone)
        # And once more, from the prefix that is cached now: its last block is copied.
        hit = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=16, logprobs=2))[0]
    assert hit.outputs[0].logprobs == alone.outputs[0].logprobs


def test_probabilities_stay_near_those_of_bf16(smollm2_path: Path, alone: RequestOutput) -> None:
    with engine(smollm2_path, kv="bf16") as llm:
        expected = llm.generate(TEXT, PARAMS)[0]

    def mean(output: RequestOutput) -> float:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        values = [entry[token].logprob for token, entry in pairs if entry]
        return sum(values) / len(values)

    assert mean(alone) != mean(expected)
    assert abs(mean(alone) - mean(expected)) < 0.02


def test_a_token_takes_little_more_than_half_the_memory(smollm2_path: Path) -> None:
    model = load_checkpoint(smollm2_path).model
    size = {}
    for kv in ("bf16", "int8"):
        backend = make_backend(model, EngineConfig(backend="native", kv=kv, threads=1))
        size[kv] = backend.kv_bytes_per_token()
        assert backend.describe()["kv"] == kv
        backend.allocate_cache(8, 16)
        assert 0 <= backend.describe()["kv_cache_bytes"] - 8 * 16 * size[kv] < 1 << 21
        backend.close()
    assert size == {"bf16": 30 * 2 * 3 * 64 * 2, "int8": KV_BYTES}


def test_the_reference_back_end_refuses_it(smollm2_path: Path) -> None:
    model = load_checkpoint(smollm2_path).model
    with pytest.raises(BackendError, match="kv is 'int8'"):
        make_backend(model, EngineConfig(backend="reference", kv="int8"))
