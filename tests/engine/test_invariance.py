"""Batch invariance of the native back end on the real model, bit for bit.

One request is run alone on a plain engine; then in every way the engine could treat it.
Its tokens and log-probabilities must not change by a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimaran import LLM, RequestOutput, SamplingParams
from trimaran.core.config import CHUNKINGS, ORDERS
from trimaran.core.presets import PRESETS

TEXT = (
    "The harbour master kept two ledgers. In the first he wrote the name of every ship, the"
    " hour of its arrival and the draught at which it lay; in the second, which nobody else had"
    " read, he noted what each captain had said of the weather, and whether it had been true."
    " Over thirty years the second ledger had become"
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, logprobs=3)
KV_BYTES = 30 * 2 * 3 * 64 * 2  # a token in 30 layers, K and V, 3 heads of 64, bf16
SMALL = {"kv_cache_bytes": 4096 * KV_BYTES}


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, **({"backend": "native"} | SMALL | options))


def same(output: RequestOutput, expected: RequestOutput) -> None:
    got, want = output.outputs[0], expected.outputs[0]
    assert got.token_ids == want.token_ids
    assert got.logprobs == want.logprobs  # floats compared exactly
    assert output.prompt_logprobs == expected.prompt_logprobs


def company(count: int) -> list[str]:
    """Prompts of many lengths that share nothing, or a beginning, with the one observed."""
    return [
        (TEXT[: 7 * i % 160] if i % 3 == 0 else "") + f"Entry {i}: " + "tide " * (i * 5 % 37)
        for i in range(count)
    ]


WEIGHTS = ["as-is", "int8", "bf16"]


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, weights: str) -> Iterator[tuple[RequestOutput, RequestOutput]]:
    with engine(smollm2_path, weights=weights, prefix_cache=False, threads=1) as llm:
        yield llm.generate(TEXT, PARAMS)[0], llm.generate(TEXT, SAMPLED)[0]


Alone = tuple[RequestOutput, RequestOutput]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_among_31_others(smollm2_path: Path, weights: str, alone: Alone, threads: int) -> None:
    with engine(smollm2_path, weights=weights, threads=threads, max_num_seqs=32) as llm:
        prompts = company(31)
        prompts.insert(13, TEXT)
        others = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
        for own, expected in zip((PARAMS, SAMPLED), alone, strict=True):
            params = [others] * 31
            params.insert(13, own)
            same(llm.generate(prompts, params)[13], expected)


@pytest.mark.parametrize("budget", [1, 7, 33])
def test_chunked_at_odd_sizes(smollm2_path: Path, weights: str, alone: Alone, budget: int) -> None:
    with engine(smollm2_path, weights=weights, max_num_batched_tokens=budget) as llm:
        same(llm.generate(TEXT, PARAMS)[0], alone[0])


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_block_sizes_and_a_prefix_hit(
    smollm2_path: Path, weights: str, alone: Alone, block_size: int, index: str
) -> None:
    with engine(smollm2_path, weights=weights, block_size=block_size, index=index) as llm:
        same(llm.generate(TEXT, PARAMS)[0], alone[0])
        for _ in range(2):
            hit = llm.generate(TEXT, SAMPLED)[0]
            length = len(hit.prompt_token_ids)
            whole = (length - 1) // block_size * block_size
            assert hit.cached_tokens == (length - 1 if index == "radix" else whole)
            same(hit, alone[1])


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_a_prefix_that_parts_in_the_middle_of_a_block(
    smollm2_path: Path, weights: str, alone: Alone, block_size: int
) -> None:
    with engine(smollm2_path, weights=weights, block_size=block_size, index="radix") as llm:
        ids = llm.tokenizer.encode(TEXT)
        for cut in (1, 21, 38):
            llm.generate([[*ids[:cut], 0, *ids[cut + 1 :]]], SAMPLED)
        output = llm.generate(TEXT, SAMPLED)[0]
        assert output.cached_tokens == 38
        same(output, alone[1])


@pytest.mark.parametrize("index", [None, "hash", "radix"])
def test_preempted_and_resumed(
    smollm2_path: Path, weights: str, alone: Alone, index: str | None
) -> None:
    # Room for about two of the eight sequences: the others are preempted again and again, and
    # find what they had computed in the prefix cache, or nothing.
    prompts = [f"{i}. {TEXT}" for i in range(7)]
    prompts.insert(5, TEXT)
    options = {
        "kv_cache_bytes": 16 * 16 * KV_BYTES,
        "prefix_cache": index is not None,
        "index": index or "hash",
    }
    with engine(smollm2_path, weights=weights, **options) as llm:
        outputs = llm.generate(prompts, SAMPLED)
        assert sum(o.metrics.preemptions for o in outputs if o.metrics) > 0
        same(outputs[5], alone[1])


POLICIES: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS),
    *({"order": name} for name in ORDERS),
    *({"chunking": name, "max_num_batched_tokens": 96} for name in CHUNKINGS),
    {"chunking": "fine", "order": "weighted-shortest", "capacity": "no-evict"},
    {"chunking": "whole", "order": "longest-prefix", "index": "radix", "block_size": 4},
    {"chunk_size": 29, "order": "priority", "capacity": "no-evict", "block_size": 8},
]


@pytest.mark.parametrize(
    "options", POLICIES, ids=lambda options: "-".join(map(str, options.values()))
)
def test_under_every_policy(
    smollm2_path: Path, policy_alone: Alone, options: dict[str, Any]
) -> None:
    """Room for a third of them, so that some wait, and some are preempted where they can be."""
    prompts = company(17)
    prompts[5:5] = [TEXT, TEXT]
    others = SamplingParams(temperature=0.7, seed=1, max_tokens=30, ignore_eos=True)
    params = [others] * 17
    params[5:5] = [PARAMS, SAMPLED]
    classes = ["interactive", "standard", "batch"]
    with engine(
        smollm2_path, weights="as-is", max_num_seqs=6, max_model_len=256,
        kv_cache_bytes=704 * KV_BYTES, **options,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            prompts, params,
            priority=[number % 3 for number in range(19)],
            slo=[classes[number % 3] for number in range(19)],
        )  # fmt: skip
        assert llm.objective().requests == 19
    for output, expected in zip(outputs[5:7], policy_alone, strict=True):
        same(output, expected)


@pytest.fixture(scope="module")
def policy_alone(smollm2_path: Path) -> tuple[RequestOutput, RequestOutput]:
    with engine(smollm2_path, weights="as-is", prefix_cache=False, threads=1) as llm:
        return llm.generate(TEXT, PARAMS)[0], llm.generate(TEXT, SAMPLED)[0]
