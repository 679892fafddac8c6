"""Configuration, names and the order of rows of decoders in GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKENS,
    VOCAB,
    WIDTH,
    gguf_keys,
    gguf_tensors,
    tiny_gguf,
    tiny_tensors,
    write_gguf,
)

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.config import ModelConfig
from trimaran.models.gguf import GGUFFile
from trimaran.models.gguf_model import read_config
from trimaran.models.load import load_checkpoint
from trimaran.models.rope import RopeSpec
from trimaran.models.storage import MappedStorage
from trimaran.models.weight import Weight

END, TEXT_END = TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")


def config_of(folder: Path, architecture: str = "llama", **changes: Any) -> ModelConfig:
    """With keys changed; a dot in a key is written as two underscores."""
    keys = {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return load_checkpoint(tiny_gguf(folder / "f.gguf", architecture, keys)).config


def test_every_field(tmp_path: Path) -> None:
    assert config_of(tmp_path) == ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        context_length=128,
        rms_norm_eps=float(np.float32(1e-5)),
        rope=RopeSpec(dim=HEAD_DIM, theta=5000.0),
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=1,
        eos_token_ids=(END, TEXT_END),
    )


def test_qwen2(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen2")
    assert (config.architecture, config.attention_bias) == ("qwen2", True)


def test_defaults(tmp_path: Path) -> None:
    changes = {"rope__freq_base": None, "rope__dimension_count": None, "vocab_size": None}
    config = config_of(tmp_path, **changes)
    assert config.rope == RopeSpec(dim=HEAD_DIM, theta=10000.0)
    assert config.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scale_linear": 2.0}, 2.0),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 8.0}, 8.0),
        ({"rope__scaling__factor": 0.0}, 1.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
    ],
)
def test_linear_rope_scaling(tmp_path: Path, changes: dict[str, Any], expected: float) -> None:
    assert config_of(tmp_path, **changes).rope.linear_factor == expected


def test_rope_divisors_are_consumed(tmp_path: Path) -> None:
    divisors = np.asarray([1, 1.5, 4, 8], np.float32)
    tensors = gguf_tensors(tiny_tensors()) | {"rope_freqs.weight": divisors}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "f.gguf", gguf_keys(), tensors))
    assert checkpoint.config.rope.divisors == (1.0, 1.5, 4.0, 8.0)
    assert "rope_freqs.weight" not in checkpoint.model.weights


@pytest.mark.parametrize(
    "divisors", [[1.0] * 3, [1.0, 0.0, 1.0, 1.0], [1.0, np.nan, 1.0, 1.0], [-1.0] * 4]
)
def test_bad_rope_divisors(tmp_path: Path, divisors: list[float]) -> None:
    stored = {"rope_freqs.weight": np.asarray(divisors, np.float32)}
    path = write_gguf(tmp_path / "f.gguf", gguf_keys(), gguf_tensors(tiny_tensors()) | stored)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (END, TEXT_END)),
        ({"eot_token_id": 5}, (END, 5, TEXT_END)),
        ({"eom_token_id": 6, "eot_token_id": 2}, (END, 6, TEXT_END)),
        ({"eos_token_id": TEXT_END}, (TEXT_END, END)),
        ({"eos_token_id": None}, (END, TEXT_END)),
        ({"token_type": None}, (END,)),
        ({"token_type": [1] * VOCAB}, (END,)),  # ordinary text that reads like an end
    ],
)
def test_end_tokens(tmp_path: Path, keys: dict[str, Any], expected: tuple[int, ...]) -> None:
    changes = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    config = load_checkpoint(tiny_gguf(tmp_path / "f.gguf", keys=changes)).config
    assert config.eos_token_ids == expected


def test_sizes_a_layer_that_are_all_equal(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, attention__head_count_kv=[KV_HEADS] * LAYERS, feed_forward_length=[HIDDEN] * 2
    )
    assert (config.num_kv_heads, config.intermediate_size) == (KV_HEADS, HIDDEN)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 0),
        ("attention.sliding_window", 128),
        ("expert_count", 0),
        ("tensor_data_layout", "Meta AI original pth"),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("attention.causal", True),
    ],
)
def test_what_changes_nothing_is_accepted(tmp_path: Path, key: str, value: object) -> None:
    assert config_of(tmp_path, **{key: value}) == config_of(tmp_path)


REFUSED = [
    ("rope.scaling.type", "yarn", "yarn"),
    ("rope.scaling.type", "longrope", "longrope"),
    ("rope.dimension_count", HEAD_DIM // 2, "rotating a part"),
    ("attention.causal", False, "False"),
    ("attention.value_length", 16, "16"),
    ("attention.head_count_kv", [2, 1], r"\[2, 1\]"),
    ("feed_forward_length", [64, 32], "different sizes"),
    ("expert_count", 8, "experts"),
    ("attention.clamp_kqv", 8.0, "may change what the model computes"),
    ("attention.scale", 0.5, "may change what the model computes"),
    ("logit_scale", 0.5, "may change what the model computes"),
    ("rope.scaling.attn_factor", 2.0, "not supported"),
    ("use_parallel_residual", True, "True"),
]


@pytest.mark.parametrize(("key", "value", "expected"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, key: str, value: object, expected: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=expected) as caught:
        config_of(tmp_path, **{key: value})
    assert f"llama.{key}" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("block_count", 0),
        ("block_count", 2**32 - 1),
        ("block_count", "two"),
        ("block_count", True),
        ("context_length", None),
        ("context_length", 2**32 - 1),
        ("embedding_length", None),
        ("feed_forward_length", 2**31),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 3),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", -1.0),
        ("rope.freq_base", float("inf")),
        ("vocab_size", VOCAB + 1),
        ("attention.key_length", 7),
    ],
)
def test_what_cannot_be(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CheckpointError):
        config_of(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"general.quantization_version": 1}, "quantization_version is 1"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, f"eos_token_id is {VOCAB}"),
        ({"tokenizer.ggml.tokens": ["a"] * (VOCAB + 1)}, f"has {VOCAB + 1} tokens"),
    ],
)
def test_other_keys(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        load_checkpoint(tiny_gguf(tmp_path / "f.gguf", keys=keys))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_values_come_back_as_they_were_before_the_file(tmp_path: Path, architecture: str) -> None:
    biased = "qkv" if architecture == "qwen2" else "qkvo"
    tensors = tiny_tensors(biased=biased)
    path = write_gguf(
        tmp_path / "f.gguf", gguf_keys(architecture), gguf_tensors(tensors, architecture)
    )
    weights = load_checkpoint(path).model.weights
    assert set(weights) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(weights[name].values(), values)
        rows = weights[name].raw_rows().copy().view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(rows, values)


def test_only_q_and_k_of_llama_are_permuted(tmp_path: Path) -> None:
    for architecture in ("llama", "qwen2"):
        weights = load_checkpoint(tiny_gguf(tmp_path / "f.gguf", architecture)).model.weights
        permuted = {
            name.split(".")[-2]: weight.head_permutation
            for name, weight in weights.items()
            if weight.head_permutation
        }
        expected = {"q_proj": HEADS, "k_proj": KV_HEADS} if architecture == "llama" else {}
        assert permuted == expected


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 4),
    half=st.integers(1, 6),
    position=st.integers(0, 1000),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpermuted_rows_turn_as_the_file_means_them(
    heads: int, half: int, position: int, seed: int
) -> None:
    """A file's rows 2i and 2i + 1 are the parts of a complex number that RoPE turns by angle i.
    After the reordering they must lie where half-split RoPE looks for them."""
    random = np.random.default_rng(seed)
    stored = random.normal(size=(heads * 2 * half, 5)).astype(np.float32)
    x = random.normal(size=5)
    angles = position * RopeSpec(dim=2 * half, theta=10000.0).frequencies()
    pairs = (stored @ x).reshape(heads, half, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)

    storage = MappedStorage("F32", stored.shape, stored.reshape(-1).view(np.uint8))
    values = Weight("q", stored.shape, storage, head_permutation=heads).values()
    ours = (values @ x).reshape(heads, 2 * half)
    first, second = ours[:, :half], ours[:, half:]
    cos, sin = np.cos(angles), np.sin(angles)
    np.testing.assert_allclose(first * cos - second * sin, turned.real, atol=1e-9)
    np.testing.assert_allclose(second * cos + first * sin, turned.imag, atol=1e-9)


def test_a_tensor_of_a_name_unknown_keeps_it_and_is_refused(tmp_path: Path) -> None:
    for extra in ("blk.0.attn_q_norm.weight", "blk.00.attn_norm.weight", "cls.weight", "x"):
        tensors = gguf_tensors(tiny_tensors()) | {extra: np.ones(8, np.float32)}
        path = write_gguf(tmp_path / "f.gguf", gguf_keys(), tensors)
        with pytest.raises(CheckpointError, match=f"tensor '{extra}' belongs to no part"):
            load_checkpoint(path)


def test_a_vector_in_blocks_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_tensors())
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "f.gguf", gguf_keys(), tensors, {"output_norm.weight": kind})
    with pytest.raises(UnsupportedModelError, match=r"'output_norm.weight' is a vector in blocks"):
        load_checkpoint(path)


def test_without_an_embedding(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_tensors())
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"'token_embd.weight' is missing"):
        load_checkpoint(write_gguf(tmp_path / "f.gguf", gguf_keys(), tensors))


def test_a_tied_head(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_tensors(tied=True))
    config = load_checkpoint(write_gguf(tmp_path / "f.gguf", gguf_keys(), tensors)).config
    assert config.tie_word_embeddings


def test_smollm2(smollm2_path: Path) -> None:
    file = GGUFFile.open(smollm2_path)
    assert len(file.tensors) == 272
    config = read_config(file, "llama")
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        rms_norm_eps=float(np.float32(1e-5)),
        rope=RopeSpec(dim=64, theta=100000.0),
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=1,
        eos_token_ids=(2, 0),
    )
    weights = load_checkpoint(smollm2_path).model.weights
    assert len(weights) == 272
    assert {weight.storage.type_name for weight in weights.values()} == {"F32", "Q4_1", "Q8_0"}


def test_metadata_and_tensors_of_smollm2_are_the_package_readers(smollm2_path: Path) -> None:
    file, reader = GGUFFile.open(smollm2_path), gguf.GGUFReader(smollm2_path)
    own = {key for key in reader.fields if not key.startswith("GGUF.")}
    assert set(file.metadata) == own
    for key in own:
        assert file.metadata[key] == reader.fields[key].contents()
    for tensor in reader.tensors:
        storage = file.tensors[tensor.name]
        assert storage.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(storage.data, tensor.data.reshape(-1).view(np.uint8))
