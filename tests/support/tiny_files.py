"""Small checkpoints on disk, in both formats, with any key or tensor changed.

Written from the formats' descriptions with the `gguf` package and the standard library,
not with the package's own code, so that a mistake in that shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from support.safetensors_file import write_safetensors


@dataclass(frozen=True)
class Sound:
    """A sound checkpoint, to be corrupted.

    Attributes:
        path: what is loaded.
        file: what holds the tensors.
        content: that file's bytes.
        header: how many of them come before the tensors' data.
    """

    path: Path
    file: Path
    content: bytes = field(repr=False)
    header: int


Array = npt.NDArray[np.float32]

HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, LAYERS, VOCAB = 4, 2, 8, 32, 64, 2, 12

TOKENS = ["<pad>", "<s>", "<|im_end|>", *"abcdefgh", "<|endoftext|>"]

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}


def tiny_tensors(*, biased: str = "", tied: bool = False, seed: int = 0) -> dict[str, Array]:
    """Random weights by Hugging Face's names.

    Args:
        biased: which of q, k, v and o have a bias.
    """
    random = np.random.default_rng(seed)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        rows = {"q": queries, "k": keys, "v": keys, "o": WIDTH}
        for part, count in rows.items():
            columns = queries if part == "o" else WIDTH
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (count, columns)
            if part in biased:
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (count,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (HIDDEN, WIDTH)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (HIDDEN, WIDTH)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"{prefix}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (WIDTH,)
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor by its Hugging Face name."""
    if name.startswith("lm_head."):
        return name.replace("lm_head", "output")
    match = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match is not None
    layer, part, kind = match.groups()
    prefix = "" if layer is None else f"blk.{layer}."
    return f"{prefix}{_PARTS[part]}.{kind}"


def interleave(rows: Array, heads: int) -> Array:
    """Rows of q or k as "llama" GGUF files store them: the two rows of a rotary pair, which
    Hugging Face keeps half a head apart, become neighbours."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(tensors: Mapping[str, Array], architecture: str = "llama") -> dict[str, Array]:
    """Tensors under the names and in the order of rows of a GGUF file."""
    stored = {}
    for name, values in tensors.items():
        own = gguf_name(name)
        if architecture == "llama" and ".attn_q." in own:
            values = interleave(values, HEADS)
        if architecture == "llama" and ".attn_k." in own:
            values = interleave(values, KV_HEADS)
        stored[own] = values
    return stored


def gguf_keys(architecture: str = "llama") -> dict[str, Any]:
    own = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": VOCAB,
    }
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 8, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Array],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a file with exactly these keys (None leaves one out) and tensors.

    Args:
        types: block types by tensor; the others are F32.
    """
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    for key, value in keys.items():
        if key == "general.architecture" or value is None:
            continue
        kind = _value_type(value)
        element = _value_type(value[0]) if kind is gguf.GGUFValueType.ARRAY else None
        if element is gguf.GGUFValueType.UINT32:
            element = gguf.GGUFValueType.INT32
        writer.add_key_value(key, value, kind, sub_type=element)
    for name, values in tensors.items():
        type_ = (types or {}).get(name)
        if type_ is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.UINT32
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT32
    return gguf.GGUFValueType.STRING


def tiny_gguf(
    path: Path, architecture: str = "llama", keys: Mapping[str, Any] | None = None
) -> Path:
    """A sound file of a tiny model, with `keys` changed or (None) left out."""
    biased = "qkv" if architecture == "qwen2" else ""
    tensors = gguf_tensors(tiny_tensors(biased=biased), architecture)
    return write_gguf(path, gguf_keys(architecture) | dict(keys or {}), tensors)


def folder_config(architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_tensors(path: Path, tensors: Mapping[str, Array], dtype: str = "F32") -> Path:
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(path, shapes, tensors.__getitem__, dtype)
    return path


def safetensors_bytes(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tiny_folder(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
    dtype: str = "F32",
    architecture: str = "LlamaForCausalLM",
) -> Path:
    """A sound folder of a tiny model, with fields of config.json changed."""
    folder.mkdir(exist_ok=True)
    biased = "qkv" if architecture == "Qwen2ForCausalLM" else ""
    fields = folder_config(architecture) | dict(config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    write_tensors(folder / "model.safetensors", tensors or tiny_tensors(biased=biased), dtype)
    return folder


def shard(folder: Path, tensors: Mapping[str, Array], shards: int) -> list[str]:
    """Replaces model.safetensors by `shards` files and an index; their names."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    order: Sequence[str] = list(tensors)
    weight_map = {name: names[i % shards] for i, name in enumerate(order)}
    for own in names:
        part = {name: tensors[name] for name in order if weight_map[name] == own}
        write_tensors(folder / own, part)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names
