"""Small models whose layers see windows of positions, as folders and GGUF files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny_files import Array, interleave, write_gguf, write_tensors

VOCAB, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW = 40, 32, 48, 4, 2, 16, 7, 6

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 33, 38, 32, 7]
"""A text for them, several windows long."""

EXPECTED = Path(__file__).with_name("tiny_windows.json")
"""Logits of every third token of `TOKENS` by transformers 5.24 in float32, by architecture."""

ARCHITECTURES = ("Gemma3ForCausalLM", "MistralForCausalLM")

_COMMON = {
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def window_config(architecture: str) -> dict[str, Any]:
    """config.json, as transformers 4 wrote them."""
    if architecture == "MistralForCausalLM":
        own = {"model_type": "mistral", "rope_theta": 5000.0, "hidden_act": "silu"}
        return {"architectures": [architecture], **_COMMON, **own, "tie_word_embeddings": False}
    return {
        "architectures": [architecture],
        "model_type": "gemma3_text",
        **_COMMON,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "cache_implementation": "hybrid",
    }


def window_tensors(architecture: str, seed: int = 0) -> dict[str, Array]:
    """Random weights by Hugging Face's names."""
    random = np.random.default_rng(seed)
    gemma3 = architecture == "Gemma3ForCausalLM"
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB, WIDTH)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma3 else []
    for layer in range(LAYERS):
        part = f"layers.{layer}."
        shapes |= {part + norm: (WIDTH,) for norm in norms}
        shapes[part + "self_attn.q_proj"] = (queries, WIDTH)
        shapes[part + "self_attn.k_proj"] = shapes[part + "self_attn.v_proj"] = (keys, WIDTH)
        shapes[part + "self_attn.o_proj"] = (WIDTH, queries)
        if gemma3:
            shapes |= {part + f"self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
        shapes[part + "mlp.gate_proj"] = shapes[part + "mlp.up_proj"] = (HIDDEN, WIDTH)
        shapes[part + "mlp.down_proj"] = (WIDTH, HIDDEN)
    shapes["norm"] = (WIDTH,)
    tensors = {}
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        values *= np.float32(0.3) if len(shape) == 1 else np.float32(2 / np.sqrt(shape[-1]))
        one = np.float32(1.0 if "norm" in name and not gemma3 else 0.0)
        tensors[f"model.{name}.weight"] = values + one
    if not gemma3:
        head = random.normal(size=(VOCAB, WIDTH)).astype(np.float32)
        tensors["lm_head.weight"] = head / np.float32(np.sqrt(WIDTH))
    return tensors


def window_folder(
    folder: Path, architecture: str, changes: Mapping[str, Any] | None = None
) -> Path:
    """A sound folder, with fields of config.json changed, or left out where they are `...`."""
    folder.mkdir(exist_ok=True)
    fields = window_config(architecture) | dict(changes or {})
    fields = {key: value for key, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    write_tensors(folder / "model.safetensors", window_tensors(architecture))
    return folder


_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def window_gguf(path: Path, architecture: str, keys: Mapping[str, Any] | None = None) -> Path:
    """The same model as a GGUF file ("llama" is Mistral's), with `keys` changed or left out."""
    source = ARCHITECTURES[0 if architecture == "gemma3" else 1]
    own = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": WINDOW,
        "rope.freq_base": 1000000.0 if architecture == "gemma3" else 5000.0,
    }
    if architecture == "gemma3":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    fields = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }
    tensors = {}
    for name, values in window_tensors(source).items():
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)  # as the files have them
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if match is None:
            tensors[_TOP[name.removesuffix(".weight")] + ".weight"] = values
            continue
        part = (_GGUF_PARTS | _NORMS[architecture])[match[2]]
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            values = interleave(values, HEADS if part == "attn_q" else KV_HEADS)
        tensors[f"blk.{match[1]}.{part}.weight"] = values
    return write_gguf(path, fields | dict(keys or {}), tensors)
