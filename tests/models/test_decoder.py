"""The decoder against a plain forward of its own, and against wrong sets of tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from support.tiny_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, WIDTH, tiny_tensors

from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.core.step_plan import StepPlan
from trimaran.models import llama, qwen2
from trimaran.models.config import ModelConfig
from trimaran.models.registry import build_model
from trimaran.models.rope import RopeSpec
from trimaran.models.storage import MappedStorage
from trimaran.models.weight import Weight

Tensors = dict[str, npt.NDArray[np.float32]]

CONFIG = ModelConfig(
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
    rope=RopeSpec(dim=HEAD_DIM, theta=500.0),
    tie_word_embeddings=False,
    attention_bias=False,
    bos_token_id=None,
    eos_token_ids=(2,),
)
LLAMA_BIASED = replace(CONFIG, attention_bias=True)
QWEN2 = replace(CONFIG, architecture="qwen2", attention_bias=True)
TIED = replace(CONFIG, tie_word_embeddings=True)


def weights_of(tensors: Tensors) -> dict[str, Weight]:
    return {
        name: Weight(
            name,
            values.shape,
            MappedStorage(
                "F32", values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            ),
        )
        for name, values in tensors.items()
    }


def plain_logits(
    config: ModelConfig, tensors: Tensors, tokens: list[int]
) -> npt.NDArray[np.float64]:
    """Logits at every position: the whole sequence at once, without a cache, in float64.

    A rotary pair is a complex number here, and heads are repeated rather than grouped.
    """
    t = {name: values.astype(np.float64) for name, values in tensors.items()}

    def norm(x: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * t[name]

    def project(x: npt.NDArray[np.float64], name: str, heads: int) -> npt.NDArray[np.float64]:
        y = x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)
        return y.reshape(len(x), heads, config.head_dim).transpose(1, 0, 2)

    def turn(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        half = config.head_dim // 2
        angles = np.outer(np.arange(x.shape[1]), config.rope.theta ** (-np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = t["model.embed_tokens.weight"][tokens]
    hidden = np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        h = norm(x, prefix + "input_layernorm.weight")
        q = turn(project(h, attention + "q_proj", config.num_heads))
        k = turn(project(h, attention + "k_proj", config.num_kv_heads))
        v = project(h, attention + "v_proj", config.num_kv_heads)
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(config.head_dim) + hidden)
        attended = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
        flat = attended.reshape(len(tokens), -1)
        x = x + flat @ t[attention + "o_proj.weight"].T + t.get(attention + "o_proj.bias", 0.0)
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = h @ t[prefix + "mlp.gate_proj.weight"].T
        up = h @ t[prefix + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ t[prefix + "mlp.down_proj.weight"].T
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T


def ours(config: ModelConfig, tensors: Tensors, tokens: list[int]) -> npt.NDArray[np.float32]:
    backend = ReferenceBackend(build_model(config, weights_of(tensors)))
    backend.allocate_cache(4, 8)
    rows = np.arange(len(tokens), dtype=np.int32)
    return backend.run(
        StepPlan(
            tokens=np.asarray(tokens, np.int32),
            positions=rows,
            slots=rows,
            row_starts=np.asarray([0, len(tokens)], np.int32),
            contexts=np.asarray([len(tokens)], np.int32),
            block_tables=np.arange(4, dtype=np.int32)[None],
            logit_rows=rows,
        )
    )


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        pytest.param(CONFIG, tiny_tensors(), id="llama"),
        pytest.param(LLAMA_BIASED, tiny_tensors(biased="qkvo"), id="llama with biases"),
        pytest.param(TIED, tiny_tensors(tied=True), id="tied"),
        pytest.param(TIED, tiny_tensors(), id="tied, with a head of its own"),
        pytest.param(QWEN2, tiny_tensors(biased="qkv"), id="qwen2"),
        pytest.param(
            replace(QWEN2, tie_word_embeddings=True),
            tiny_tensors(biased="qkv", tied=True),
            id="qwen2, tied",
        ),
    ],
)
def test_forward(config: ModelConfig, tensors: Tensors) -> None:
    small = {
        name: values if "norm" in name else values * np.float32(0.3)
        for name, values in tensors.items()
    }
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    expected = plain_logits(config, small, tokens)
    np.testing.assert_allclose(ours(config, small, tokens), expected, rtol=1e-4, atol=1e-5)


def test_every_tensor_changes_the_logits() -> None:
    """No weight is taken and then not used: moving any of them moves the logits."""
    tensors = {n: v * np.float32(0.3) for n, v in tiny_tensors(biased="qkvo").items()}
    tokens = [3, 1, 4, 1, 5]
    before = ours(LLAMA_BIASED, tensors, tokens)
    for name, values in tensors.items():
        noise = np.random.default_rng(0).normal(size=values.shape).astype(np.float32)
        # A constant added to all keys moves every score of a row alike, so softmax hides it;
        # RoPE turns it with the position, and that shows.
        after = ours(LLAMA_BIASED, tensors | {name: values + noise}, tokens)
        assert np.abs(after - before).max() > 1e-4, name


@pytest.mark.parametrize(
    ("config", "expected", "tensors"),
    [
        (CONFIG, llama.expected_tensors, tiny_tensors()),
        (LLAMA_BIASED, llama.expected_tensors, tiny_tensors(biased="qkvo")),
        (TIED, llama.expected_tensors, tiny_tensors(tied=True)),
        (QWEN2, qwen2.expected_tensors, tiny_tensors(biased="qkv")),
    ],
)
def test_expected_tensors(config: ModelConfig, expected: object, tensors: Tensors) -> None:
    assert callable(expected)
    shapes = {name: values.shape for name, values in tensors.items()}
    assert expected(config) == shapes
    assert set(build_model(config, weights_of(tensors)).weights) == set(tensors)


@pytest.mark.parametrize("config", [CONFIG, QWEN2], ids=["llama", "qwen2"])
def test_any_missing_tensor_is_named(config: ModelConfig) -> None:
    tensors = tiny_tensors(biased="qkv" if config is QWEN2 else "")
    for name in tensors:
        rest = {other: values for other, values in tensors.items() if other != name}
        with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
            build_model(config, weights_of(rest))


@pytest.mark.parametrize("config", [CONFIG, QWEN2], ids=["llama", "qwen2"])
def test_any_misshaped_tensor_is_named_with_both_shapes(config: ModelConfig) -> None:
    tensors = tiny_tensors(biased="qkv" if config is QWEN2 else "")
    for name, values in tensors.items():
        for wrong in (values[..., :-1], values[:-1], values[None], values.reshape(-1, 1)):
            with pytest.raises(CheckpointError) as caught:
                build_model(config, weights_of(tensors | {name: wrong}))
            for part in (name, str(wrong.shape), str(values.shape)):
                assert part in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.0.rotary_emb.inv_freq",
        "model.layers.x.self_attn.rotary_emb.inv_freq",
        "vision_tower.weight",
        "rotary_emb.inv_freq.extra",
    ],
)
def test_a_superfluous_tensor_is_named(name: str) -> None:
    tensors = tiny_tensors() | {name: np.ones(WIDTH, np.float32)}
    with pytest.raises(CheckpointError, match=f"tensor '{name}' belongs to no part"):
        build_model(CONFIG, weights_of(tensors))


def test_a_bias_of_o_is_superfluous_in_qwen2() -> None:
    with pytest.raises(CheckpointError, match=r"o_proj\.bias' belongs to no part"):
        build_model(QWEN2, weights_of(tiny_tensors(biased="qkvo")))


def test_rotary_frequencies_of_old_files_are_no_weights() -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    model = build_model(CONFIG, weights_of(tiny_tensors() | extra))
    assert set(model.weights) == set(tiny_tensors())


def test_a_head_beside_a_tied_embedding_unties_it() -> None:
    assert not build_model(TIED, weights_of(tiny_tensors())).config.tie_word_embeddings
    assert build_model(TIED, weights_of(tiny_tensors(tied=True))).config.tie_word_embeddings


def test_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt5' is not supported; .* llama, qwen2"):
        build_model(replace(CONFIG, architecture="gpt5"), {})
