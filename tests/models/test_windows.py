"""Models whose layers see windows of positions: what is read of them, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import int32
from support.tiny_windows import (
    ARCHITECTURES,
    EXPECTED,
    HEAD_DIM,
    LAYERS,
    TOKENS,
    WINDOW,
    window_folder,
    window_gguf,
    window_tensors,
)

from trimaran.compute.backend import Backend
from trimaran.compute.native.backend import NativeBackend, available_isas
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.core.step_plan import Float32, GroupTables, StepPlan
from trimaran.models.config import ModelConfig
from trimaran.models.huggingface import read_config
from trimaran.models.layer_groups import LayerGroup, layer_groups
from trimaran.models.load import load_checkpoint
from trimaran.models.rope import RopeSpec

GEMMA3, MISTRAL = ARCHITECTURES
PATTERN = (WINDOW,) * 5 + (0, WINDOW)


def logits(backend: Backend, chunk: int = len(TOKENS), size: int = 4) -> Float32:
    """Of every token, computed in chunks; the tables of a group with a window have no blocks
    before what the chunk's first row sees."""
    groups = backend.layer_groups()
    count = -(-len(TOKENS) // size)
    backend.allocate_cache(count, size)
    found = []
    for start in range(0, len(TOKENS), chunk):
        end = min(len(TOKENS), start + chunk)
        tables = []
        for number, group in enumerate(groups):
            blocks = np.roll(np.arange(count), number)[None].astype(np.int32)
            gone = max(0, start - group.window + 1) // size if group.window else 0
            blocks[0, :gone] = -1
            positions = np.arange(start, end)
            slots = blocks[0, positions // size] * size + positions % size
            tables.append(GroupTables(int32(slots), blocks, int32([]).reshape(0, 2)))
        rows = np.arange(end - start, dtype=np.int32)
        plan = StepPlan(
            tokens=int32(TOKENS[start:end]),
            positions=rows + np.int32(start),
            slots=tables[0].slots,
            row_starts=int32([0, end - start]),
            contexts=int32([end]),
            block_tables=tables[0].block_tables,
            logit_rows=rows,
            more=tuple(tables[1:]),
        )
        found.append(backend.run(plan).copy())
    backend.close()
    return np.concatenate(found)


def stored(architecture: str) -> Float32:
    return np.array(json.loads(EXPECTED.read_text())[architecture], np.float32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reference_against_transformers(tmp_path: Path, architecture: str) -> None:
    model = load_checkpoint(window_folder(tmp_path / "m", architecture)).model
    whole = logits(ReferenceBackend(model))
    np.testing.assert_allclose(whole[::3], stored(architecture), rtol=1e-4, atol=2e-5)
    assert np.array_equal(logits(ReferenceBackend(model), chunk=5), whole)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("isa", available_isas())
def test_native_against_transformers(tmp_path: Path, architecture: str, isa: str) -> None:
    model = load_checkpoint(window_folder(tmp_path / "m", architecture)).model
    whole = logits(NativeBackend(model, isa=isa, threads=2, max_rows=64))
    expected = stored(architecture)
    error = np.sqrt(np.mean((whole[::3] - expected) ** 2))
    # Weights and KV are rounded to bf16; a window longer by one position makes it 0.28 or more.
    assert error < 0.06 * expected.std()
    for chunk in (1, 5):
        backend = NativeBackend(model, isa=isa, threads=1, max_rows=64)
        assert np.array_equal(logits(backend, chunk), whole)


@pytest.mark.parametrize(("architecture", "name"), [("gemma3", GEMMA3), ("llama", MISTRAL)])
def test_a_gguf_file_computes_the_same(tmp_path: Path, architecture: str, name: str) -> None:
    model = load_checkpoint(window_gguf(tmp_path / "m.gguf", architecture)).model
    found = logits(ReferenceBackend(model))[::3]
    if architecture == "gemma3":  # whose scores have the scale of its heads here
        assert model.config.query_scale is None
        folder = window_folder(tmp_path / "m", name, {"query_pre_attn_scalar": HEAD_DIM})
        expected = logits(ReferenceBackend(load_checkpoint(folder).model))[::3]
    else:
        expected = stored(name)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_every_tensor_changes_the_logits(tmp_path: Path) -> None:
    model = load_checkpoint(window_folder(tmp_path / "m", GEMMA3)).model
    before = logits(ReferenceBackend(model))
    for name, weight in model.weights.items():
        backend = ReferenceBackend(model)
        noise = np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)
        backend._values[name] = weight.values() + noise
        assert np.abs(logits(backend) - before).max() > 1e-3, name


def test_groups_of_layers(tmp_path: Path) -> None:
    config = read_config(window_folder(tmp_path / "m", GEMMA3))
    assert layer_groups(config) == (LayerGroup(0, (5,)), LayerGroup(WINDOW, (0, 1, 2, 3, 4, 6)))
    config = read_config(window_folder(tmp_path / "n", MISTRAL))
    assert layer_groups(config) == (LayerGroup(WINDOW, tuple(range(LAYERS))),)


def test_gemma3_config(tmp_path: Path) -> None:
    config = read_config(window_folder(tmp_path / "m", GEMMA3))
    assert config.windows == PATTERN
    assert config.rope == RopeSpec(dim=HEAD_DIM, theta=1e6, linear_factor=8.0)
    assert config.local_rope == RopeSpec(dim=HEAD_DIM, theta=1e4)
    assert config.attention_scale() == 24**-0.5
    assert config.layer_rope(5) is config.rope and config.layer_rope(6) is config.local_rope
    assert config.tie_word_embeddings


NEW_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [("sliding" if w else "full") + "_attention" for w in PATTERN]},
        {
            "rope_theta": ...,
            "rope_local_base_freq": ...,
            "rope_scaling": ...,
            "rope_parameters": NEW_ROPES,
        },
        {"sliding_window_pattern": ..., "_sliding_window_pattern": 6},
        {"use_bidirectional_attention": False, "use_cache": True},
        {"hidden_activation": ..., "tie_word_embeddings": True, "cache_implementation": ...},
    ],
)
def test_ways_to_write_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = read_config(window_folder(tmp_path / "m", GEMMA3))
    assert read_config(window_folder(tmp_path / "m", GEMMA3, changes)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_activation": "silu"},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"attention_bias": True},
        {"layer_types": ["chunked_attention"] * LAYERS},
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {next(iter(changes))} is"):
        read_config(window_folder(tmp_path / "m", GEMMA3, changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 0},
        {"sliding_window_pattern": 0},
        {"layer_types": ["full_attention"]},
        {"query_pre_attn_scalar": 0},
        {"rope_parameters": NEW_ROPES},  # beside rope_scaling
        {"rope_scaling": ..., "rope_parameters": {"full_attention": 3}},
        {"rope_scaling": ..., "rope_parameters": {"other_attention": {}}},
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read_config(window_folder(tmp_path / "m", GEMMA3, changes))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (WINDOW,) * LAYERS),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 128}, ()),  # as long as the context
        ({"sliding_window": ...}, ()),  # 4096, beyond the context
        ({"sliding_window": ..., "max_position_embeddings": 8192}, (4096,) * LAYERS),
    ],
)
def test_mistral(tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read_config(window_folder(tmp_path / "m", MISTRAL, changes)).windows == windows


def gguf_config(path: Path, **keys: object) -> ModelConfig:
    return load_checkpoint(
        window_gguf(path, "gemma3", {f"gemma3.{key}": value for key, value in keys.items()})
    ).config


def test_gguf_config(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = gguf_config(path)
    assert config.windows == PATTERN and config.tie_word_embeddings
    assert config.rope == RopeSpec(dim=HEAD_DIM, theta=1e6, linear_factor=8.0)
    assert config.local_rope == RopeSpec(dim=HEAD_DIM, theta=1e4)
    assert gguf_config(path, **{"attention.sliding_window_pattern": 2}).windows == (
        *(WINDOW, 0) * 3,
        WINDOW,
    )
    flags = [False, True] * 3 + [True]
    assert gguf_config(path, **{"attention.sliding_window_pattern": flags}).windows == tuple(
        WINDOW * flag for flag in flags
    )
    assert gguf_config(path, **{"rope.freq_base_swa": 5e3}).local_rope == RopeSpec(
        dim=HEAD_DIM, theta=5e3
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"attention.sliding_window": None},
        {"attention.sliding_window_pattern": [True]},
        {"attention.sliding_window_pattern": 0},
        {"final_logit_softcapping": 30.0},
    ],
)
def test_unsound_gguf_config(tmp_path: Path, keys: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=f"gemma3.{next(iter(keys))}"):
        gguf_config(tmp_path / "m.gguf", **keys)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    assert "model.layers.3.self_attn.q_norm.weight" in window_tensors(GEMMA3)
    model = load_checkpoint(window_folder(tmp_path / "m", GEMMA3)).model
    weights = dict(model.weights)
    del weights["model.layers.3.self_attn.q_norm.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.q_norm\.weight' is missing"):
        type(model)(model.config, weights)  # type: ignore[call-arg]


def test_other_numbers_of_groups_are_refused(tmp_path: Path) -> None:
    from trimaran.core.errors import BackendError

    model = load_checkpoint(window_folder(tmp_path / "m", GEMMA3)).model
    for backend in (ReferenceBackend(model), NativeBackend(model, max_rows=8, threads=1)):
        with pytest.raises(BackendError, match="3 groups of layers; the model has 2"):
            backend.allocate_cache([4, 4, 4], 4)
        backend.allocate_cache([4, 4], 4)
        one = int32([0])
        own = GroupTables(one, one[None], int32([]).reshape(0, 2))
        plan = StepPlan(one, one, one, int32([0, 1]), int32([1]), one[None], one)
        assert np.isfinite(backend.run(plan)).all()  # one table for all groups
        bad = StepPlan(one, one, one, int32([0, 1]), int32([1]), one[None], one, more=(own, own))
        with pytest.raises(BackendError, match="3 groups of layers, not 2"):
            backend.run(bad)
