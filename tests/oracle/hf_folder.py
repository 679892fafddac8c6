"""A GGUF model written as a Hugging Face folder: the same weights, in the other format.

Written from the formats' descriptions and not with the package's own readers, so that a
mistake in those shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from support.safetensors_file import write_safetensors

# llama and qwen2 files.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

_ATOMIC_TOKEN_TYPES = (3, 4)  # control, user-defined


def write_hf_folder(source: str | Path, folder: str | Path, dtype: str = "F32") -> None:
    """Writes config.json, model.safetensors and tokenizer.json of a "llama" GGUF file.

    Args:
        dtype: "F32", which holds the dequantised values exactly, or "BF16".
    """
    folder = Path(folder)
    reader = gguf.GGUFReader(source)
    config = _config(reader, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(reader), ensure_ascii=False))
    tensors = _tensors(reader, config)
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(folder / "model.safetensors", shapes, tensors.__getitem__, dtype)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: gguf.GGUFReader, dtype: str) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    width = _field(reader, "llama.embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": width,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
    }


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            # The file pairs neighbouring rows for RoPE, Hugging Face the halves of a head.
            pairs = values.reshape(heads[kind], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensors[_hf_name(tensor.name)] = values
    return tensors


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
    return f"{_OTHER_TENSORS[parts[0]]}.{parts[1]}"


def _tokenizer(reader: gguf.GGUFReader) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE whose digits stand alone (`smollm`)."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    assert _field(reader, "tokenizer.ggml.pre") == "smollm"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in _ATOMIC_TOKEN_TYPES
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in _field(reader, "tokenizer.ggml.merges")],
        },
    }
