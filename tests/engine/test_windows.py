"""Engines over small models with windows: the same bits whatever goes on, and bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.tiny import ArrayStorage, tiny_config, tiny_model, tiny_tokenizer

from trimaran.cache.grouped import GroupedKVCache
from trimaran.compute.native.backend import NativeBackend
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.clock import VirtualClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError, ConfigError
from trimaran.core.request import Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.collector import OutputCollector
from trimaran.engine.core import EngineCore
from trimaran.engine.factory import LoadedModel, make_core
from trimaran.engine.group_memory import plan_groups
from trimaran.models.gemma3 import Gemma3Model, expected_tensors
from trimaran.models.layer_groups import LayerGroup
from trimaran.models.model import Model
from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight

WINDOW, SIZE = 20, 4


def gemma3() -> Model:
    config = tiny_config(
        architecture="gemma3",
        num_layers=4,
        tie_word_embeddings=True,
        windows=(WINDOW, 7, 0, WINDOW),
        local_rope=RopeSpec(dim=16, theta=1000.0),
    )
    rng = np.random.default_rng(3)
    weights = {}
    for name, shape in expected_tensors(config).items():
        values = rng.normal(size=shape).astype(np.float32)
        values = 1 + 0.2 * values if name.endswith("norm.weight") else values / np.sqrt(shape[-1])
        weights[name] = Weight(name, shape, ArrayStorage(values.astype(np.float32)))
    return Gemma3Model(config, weights)


MODELS = {"gemma3": gemma3, "mistral": lambda: tiny_model(windows=(WINDOW, WINDOW))}


def engine(model: str, backend: str = "native", **options: Any) -> EngineCore:
    made = MODELS[model]()
    config = EngineConfig.from_mapping(
        {"block_size": SIZE, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 20} | options
    )
    if backend == "native":
        kv = "bf16" if config.kv == "auto" else config.kv
        runs: Any = NativeBackend(made, kv=kv, threads=2, max_rows=64)
    else:
        runs = ReferenceBackend(made)
    loaded = LoadedModel(made.config, tiny_tokenizer(), None, runs)
    return make_core(loaded, config, VirtualClock())


def run(core: EngineCore, *prompts: list[int], count: int = 24) -> list[Any]:
    """(tokens, log-probabilities) of each, (cached tokens, preemptions) of each."""
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=2, ignore_eos=True)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    collectors = {r.id: OutputCollector(r.id, None, r.prompt, 1) for r in requests}
    for request in requests:
        core.add(request)
    kv = core.scheduler.kv
    assert isinstance(kv, GroupedKVCache)
    while core.has_work:
        for delta in core.step():
            collectors[delta.request_id].add(delta)
        kv.check()
    assert kv.usage().held == 0 and all(group.pool.num_held == 0 for group in kv.groups)
    results = [collectors[r.id].result() for r in requests]
    return [
        ((o.outputs[0].token_ids, o.outputs[0].logprobs), o.cached_tokens, o.metrics.preemptions)
        for o in results
        if o.metrics is not None
    ]


TEXT = np.random.default_rng(1).integers(0, 250, 90).tolist()
OTHERS = [TEXT[:50] + [i] * (3 * i + 1) for i in range(7)]


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def alone(request: pytest.FixtureRequest) -> tuple[str, Any]:
    core = engine(request.param, prefix_cache=False, max_num_batched_tokens=64)
    return request.param, run(core, TEXT)[0][0]


def test_chunked_at_odd_sizes(alone: tuple[str, Any]) -> None:
    model, expected = alone
    for rows in (1, 7, 33):
        assert run(engine(model, max_num_batched_tokens=rows), TEXT)[0][0] == expected


@pytest.mark.parametrize("size", [4, 8, 16, 32])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_prefix_hit_at_every_block_size(alone: tuple[str, Any], size: int, index: str) -> None:
    model, expected = alone
    core = engine(model, block_size=size, index=index)
    for again in (False, True):
        (found,) = run(core, TEXT)
        assert found[0] == expected
        assert found[1] >= (len(TEXT) - size if again else 0)


def test_in_company_and_after_preemption(alone: tuple[str, Any]) -> None:
    model, expected = alone
    core = engine(model)
    results = run(core, *OTHERS[:3], TEXT, *OTHERS[3:])
    assert results[3][0] == expected
    # Room for about two of them.
    made = core.backend.kv_bytes_per_token()
    small = engine(model, kv_cache_bytes=made * 100, max_num_batched_tokens=16, max_num_seqs=8)
    results = run(small, *OTHERS[:3], TEXT, *OTHERS[3:], count=24)
    assert sum(preemptions for _, _, preemptions in results) > 0
    assert results[3][0] == expected


def test_an_int8_cache(alone: tuple[str, Any]) -> None:
    model, _ = alone
    expected = run(engine(model, kv="int8", prefix_cache=False), TEXT)[0][0]
    assert run(engine(model, kv="int8", max_num_batched_tokens=7), *OTHERS, TEXT)[-1][0] == expected


@pytest.mark.parametrize("model", MODELS)
def test_the_reference_agrees_with_itself(model: str) -> None:
    text = TEXT[:40]
    expected = run(engine(model, "reference", prefix_cache=False), text, count=6)[0][0]
    core = engine(model, "reference", max_num_batched_tokens=9)
    for _ in range(2):
        assert run(core, text, count=6)[0][0] == expected


@pytest.mark.parametrize("model", MODELS)
def test_held_blocks_stay_within_the_window(model: str) -> None:
    """A text many windows long: what a group holds doesn't grow with it."""
    core = engine(model, max_num_batched_tokens=8)
    kv = core.scheduler.kv
    assert isinstance(kv, GroupedKVCache)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    core.add(Request("r", TEXT, params))
    most = dict.fromkeys(kv.groups, 0)
    while core.has_work:
        core.step()
        for group in kv.groups:
            most[group] = max(most[group], group.pool.num_held)
    for group, held in most.items():
        assert held <= -(-(group.window - 1 + 8) // SIZE) + 2 < len(TEXT) // SIZE


def test_a_text_longer_than_the_cache() -> None:
    """All layers see a window, and the cache holds a third of the text."""
    made = engine("mistral").backend.kv_bytes_per_token()
    core = engine("mistral", kv_cache_bytes=made * 64, max_num_batched_tokens=8, max_num_seqs=1)
    assert core.max_model_len == 256
    text = TEXT + TEXT
    (found,) = run(core, text)
    (expected,) = run(engine("mistral"), text)
    assert found[0] == expected[0]


GROUPS = (LayerGroup(0, (5, 11)), LayerGroup(512, tuple(range(5)) + tuple(range(6, 11))))


def test_the_memory_of_each_group() -> None:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=1024)
    plan = plan_groups(config, 32768, GROUPS, 1000, 1 << 40)
    window = 8 * (512 // 16 + 2) + 64
    assert plan.blocks == (8 * 2048, 2 * window)  # all that could be used; and twice the windows
    assert plan.max_model_len == 32768
    config = EngineConfig(kv_cache_bytes=300_000_000, max_num_seqs=8, max_num_batched_tokens=1024)
    plan = plan_groups(config, 32768, GROUPS, 1000, 0)
    used = plan.blocks[0] * 16 * 2000 + plan.blocks[1] * 16 * 10_000
    assert used <= 300_000_000 and plan.blocks[1] * 160_000 <= 150_000_000
    assert plan.max_model_len == min(32768, plan.blocks[0] * 16)
    assert "512" in plan.reason and str(plan.blocks[1]) in plan.reason


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_bytes": 10_000_000}, {"kv_cache_bytes": 40_000_000, "max_model_len": 32768}],
)
def test_too_little_memory_says_what_to_change(options: dict[str, int]) -> None:
    with pytest.raises(CapacityError, match="a window of 512.*raise kv_cache_bytes"):
        plan_groups(EngineConfig(**options), 32768, GROUPS, 1000, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="above the model's context of 100"):
        plan_groups(EngineConfig(max_model_len=200), 100, GROUPS, 1000, 1 << 40)


def test_what_does_not_go_with_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity is 'no-evict', which doesn't go with this"):
        engine("gemma3", capacity="no-evict")
