"""Every field of config.json is honoured, refused by name, or known to change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    folder_config,
    tiny_folder,
)

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.config import ModelConfig
from trimaran.models.huggingface import read_config
from trimaran.models.load import load_checkpoint
from trimaran.models.rope import Llama3Scaling, RopeSpec


def config_of(
    folder: Path, architecture: str = "LlamaForCausalLM", **changes: object
) -> ModelConfig:
    """Of config.json with fields changed, or left out where the value is `...`."""
    fields: dict[str, Any] = folder_config(architecture) | changes
    fields = {key: value for key, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return read_config(folder)


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
        rms_norm_eps=1e-5,
        rope=RopeSpec(dim=HEAD_DIM, theta=5000.0),
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("name", "architecture", "bias"),
    [
        ("LlamaForCausalLM", "llama", False),
        ("MistralForCausalLM", "llama", False),
        ("Qwen2ForCausalLM", "qwen2", True),
    ],
)
def test_architectures(tmp_path: Path, name: str, architecture: str, bias: bool) -> None:
    config = config_of(tmp_path, name)
    assert (config.architecture, config.attention_bias) == (architecture, bias)
    assert load_checkpoint(tiny_folder(tmp_path / "m", architecture=name)).config == config


def test_defaults(tmp_path: Path) -> None:
    absent = dict.fromkeys(["num_key_value_heads", "rope_theta", "bos_token_id", "hidden_act"], ...)
    config = config_of(tmp_path, tie_word_embeddings=..., eos_token_id=..., **absent)
    assert config.num_kv_heads == HEADS
    assert config.rope.theta == 10000.0
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert not config.tie_word_embeddings


def test_a_head_dim_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, head_dim=16)
    assert (config.head_dim, config.rope.dim) == (16, 16)


def test_attention_bias(tmp_path: Path) -> None:
    assert config_of(tmp_path, attention_bias=True).attention_bias


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_SPEC = RopeSpec(dim=HEAD_DIM, theta=5000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 64))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, RopeSpec(dim=HEAD_DIM, theta=5000.0)),
        ({"rope_scaling": {"type": "default"}}, RopeSpec(dim=HEAD_DIM, theta=5000.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeSpec(dim=HEAD_DIM, theta=5000.0, linear_factor=4.0),
        ),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_SPEC),
        ({"rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}}, LLAMA3_SPEC),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 700}},
            RopeSpec(dim=HEAD_DIM, theta=700.0),
        ),
        (
            {"rope_theta": 5000.0, "rope_parameters": {"rope_theta": 5000.0}},
            RopeSpec(dim=HEAD_DIM, theta=5000.0),
        ),
        (
            {
                "rope_theta": ...,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e3, **LLAMA3},
            },
            LLAMA3_SPEC,
        ),
    ],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], expected: RopeSpec) -> None:
    assert config_of(tmp_path, **changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "beta is 1"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "factor is 2.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention is {}"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta is 7.0"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": 3}}, "type is 3"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0",
        ),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": {}}, "rope_parameters is {}"),
    ],
)
def test_bad_rope(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        config_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, {"eos_token_id": [5, 2]}, (2, 5)),
        (..., {"eos_token_id": 4}, (4,)),
        (2, {"temperature": 0.7}, (2,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens(
    tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert config_of(tmp_path, eos_token_id=config).eos_token_ids == expected


@pytest.mark.parametrize("value", [VOCAB, -1, "2", 2.0, True, [2, None], {"a": 2}])
def test_bad_end_tokens(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        config_of(tmp_path, eos_token_id=value)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        config_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}),
        ("LlamaForCausalLM", {"mlp_bias": True}),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}),
        ("LlamaForCausalLM", {"rope_interleaved": True}),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}),
        ("LlamaForCausalLM", {"num_local_experts": 8}),
        ("LlamaForCausalLM", {"logit_scale": 0.1}),
        ("LlamaForCausalLM", {"residual_multiplier": 0.2}),
        ("LlamaForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("LlamaForCausalLM", {"auto_map": {"AutoModel": "modeling.Own"}}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}),
        ("Qwen2ForCausalLM", {"attention_bias": False}),
        ("Qwen2ForCausalLM", {"use_mrope": True}),
        ("MistralForCausalLM", {"attention_bias": True}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {next(iter(changes))} is"):
        config_of(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 64}),
        ("Qwen2ForCausalLM", {"max_window_layers": 21, "use_mrope": False}),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 2, "dtype": "bfloat16"}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 128}),
        ("LlamaForCausalLM", {"quantization_config": None, "mlp_bias": False}),
        ("LlamaForCausalLM", {"pretraining_tp": 1, "_name_or_path": "x", "use_cache": True}),
        ("LlamaForCausalLM", {"transformers.js_config": {"dtype": "q4"}, "pad_token_id": 0}),
        ("LlamaForCausalLM", {"unsloth_version": "1", "rope_interleaved": False}),
    ],
)
def test_what_changes_nothing_is_accepted(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    assert config_of(tmp_path, name, **changes) == config_of(tmp_path, name)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("vocab_size", [..., 0, -1, 1.5, "9", True, 1 << 40]),
        ("hidden_size", [..., 0, 1 << 40, 30]),
        ("intermediate_size", [..., 0, None, 1 << 40]),
        ("num_hidden_layers", [..., 0, 1 << 20]),
        ("num_attention_heads", [..., 0, 3, 1 << 20]),
        ("num_key_value_heads", [0, 3, 8]),
        ("head_dim", [0, 7, "8"]),
        ("max_position_embeddings", [..., 0, 1 << 40]),
        ("rms_norm_eps", [..., 0, -1e-5, "1e-5", 10**400]),
        ("rope_theta", [0, -5, "x"]),
        ("tie_word_embeddings", [0, "yes"]),
        ("bos_token_id", [VOCAB, -1, [1]]),
        ("architectures", [..., [], "LlamaForCausalLM", [1], ["LlamaForCausalLM"] * 2]),
        ("layer_types", ["full_attention"]),
    ],
)
def test_what_cannot_be(tmp_path: Path, field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(CheckpointError):
            config_of(tmp_path, **{field: value})


def test_an_unknown_architecture_is_named_with_those_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        config_of(tmp_path, architectures=["Llama4ForCausalLM"])
    for name in ("'Llama4ForCausalLM'", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_unsound_json(tmp_path: Path, text: str) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_checkpoint(folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(folder)


def test_a_huge_json_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)  # sparse
    with pytest.raises(CheckpointError, match="above the limit"):
        read_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = [*folder_config(), "head_dim", "rope_scaling", "rope_parameters", "layer_types"]


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_any_value_of_any_field_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        config = config_of(folder, **changes)
    except CheckpointError as error:
        assert "config.json" in str(error)
    else:
        assert config.num_heads % config.num_kv_heads == 0
