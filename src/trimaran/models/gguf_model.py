"""A decoder in a GGUF file: its configuration and its weights under canonical names.

Keys and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the
constants of the `gguf` package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.config import ModelConfig
from trimaran.models.fields import Fields
from trimaran.models.gguf import BLOCK_TYPES, GGUFFile
from trimaran.models.limits import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    check_heads,
)
from trimaran.models.rope import RopeSpec
from trimaran.models.storage import MappedStorage
from trimaran.models.weight import Weight

ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor that is no weight: it becomes part of `RopeSpec`."""

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
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
_GEMMA3_LAYER_TENSORS = {
    **_LAYER_TENSORS,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?([a-z_]+)\.(weight|bias)")

_GEMMA3_PATTERN = 6  # every so manieth layer sees all positions
_GEMMA3_27B_LAYERS = 62  # that model scales its scores by another size than its heads'

# Architectures whose q and k rows are stored for a RoPE of neighbouring pairs.
_INTERLEAVED_ROPE = frozenset({"llama"})

# Tokens that end a turn or a text, by the conventions of the common chat formats. Files
# often name only one of a model's end tokens.
_END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
    }
)
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_UNUSED_KEYS = (
    "attention.layer_norm_epsilon",  # of a norm that these architectures don't have
    "rope.scaling.original_context_length",  # linear scaling doesn't depend on it
    "rope.scaling.finetuned",
    "tensor_data_layout",  # where the weights came from; the layout of the file is the same
)
_SUPPORTED_QUANTIZATION_VERSION = 2


def read_config(file: GGUFFile, architecture: str) -> ModelConfig:
    """The configuration from the metadata; nothing under the architecture's prefix is ignored.

    Raises:
        CheckpointError: a field is missing or can't be.
        UnsupportedModelError: a field asks for what isn't implemented.
    """
    _check_general(file)
    fields = Fields(file.metadata, str(file.path), f"{architecture}.")
    heads = _same_in_all_layers(fields, "attention.head_count", MAX_HEADS)
    kv_heads = _same_in_all_layers(fields, "attention.head_count_kv", MAX_HEADS, default=heads)
    hidden = fields.integer("embedding_length", 1, MAX_WIDTH)
    head_dim = fields.integer("attention.key_length", 1, MAX_WIDTH, default=max(1, hidden // heads))
    fields.only("attention.value_length", head_dim, why=f"keys have {head_dim} elements")
    context = fields.integer("context_length", 1, MAX_CONTEXT)
    vocab = _vocab_size(file, fields)
    tokenizer = Fields(file.metadata, str(file.path), "tokenizer.ggml.")
    layers = fields.integer("block_count", 1, MAX_LAYERS)
    gemma3 = architecture == "gemma3"
    windows = _windows(fields, architecture, layers, context)
    rope = _rope(file, fields, head_dim)
    local = fields.real("rope.freq_base_swa", 10000.0) if gemma3 else None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_same_in_all_layers(fields, "feed_forward_length", MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        bos_token_id=tokenizer.token("bos_token_id", vocab),
        eos_token_ids=_end_tokens(file, tokenizer, vocab),
        windows=windows,
        local_rope=None if local is None else RopeSpec(dim=head_dim, theta=local),
        query_scale=(hidden // heads) ** -0.5 if gemma3 and layers == _GEMMA3_27B_LAYERS else None,
    )
    check_heads(config, str(file.path))
    _refuse_the_rest(fields)
    return config


def read_weights(file: GGUFFile, config: ModelConfig) -> dict[str, Weight]:
    """The tensors by canonical name; a name that isn't known stays as it is.

    Raises:
        UnsupportedModelError: a vector is stored in blocks.
    """
    parts = _GEMMA3_LAYER_TENSORS if config.architecture == "gemma3" else _LAYER_TENSORS
    interleaved = config.architecture in _INTERLEAVED_ROPE
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if interleaved else {}
    weights = {}
    for stored_name, storage in file.tensors.items():
        if stored_name == ROPE_DIVISORS:
            continue
        name, part = _canonical(stored_name, parts)
        if len(storage.shape) == 1 and BLOCK_TYPES[storage.type_id].elements > 1:
            raise UnsupportedModelError(
                f"{file.path}: tensor {stored_name!r} is a vector in blocks of"
                f" {storage.type_name}; store it as F32"
            )
        weights[name] = Weight(name, storage.shape, storage, heads.get(part, 0))
    return weights


def _canonical(stored: str, parts: Mapping[str, str]) -> tuple[str, str]:
    """(Hugging Face's name, the middle of the file's name) of a tensor."""
    match = _NAME.fullmatch(stored)
    if match is None:
        return stored, ""
    layer, part, kind = match.groups()
    if layer is None:
        return (f"{_TENSORS[part]}.{kind}" if part in _TENSORS else stored), part
    if part not in parts:
        return stored, part
    return f"model.layers.{layer}.{parts[part]}.{kind}", part


def _check_general(file: GGUFFile) -> None:
    general = Fields(file.metadata, str(file.path))
    general.only("general.type", "model", why="it is no model of its own; give the model's file")
    general.only(
        "general.quantization_version",
        _SUPPORTED_QUANTIZATION_VERSION,
        why=f"only version {_SUPPORTED_QUANTIZATION_VERSION} is supported; convert it anew",
    )
    general.only(
        "split.count",
        0,
        1,
        why="join the parts into one file with 'llama-gguf-split --merge'",
    )


def _same_in_all_layers(fields: Fields, key: str, most: int, default: int | None = None) -> int:
    """A count that may be written once or once a layer; it must be equal in all layers."""
    value = fields.value(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise fields.unsupported(key, value, "layers of different sizes are not supported")
        only = {fields.prefix + key: value[0]}
        return Fields(only, fields.where, fields.prefix).integer(key, 1, most)
    return fields.integer(key, 1, most, default)


def _windows(fields: Fields, architecture: str, layers: int, context: int) -> tuple[int, ...]:
    """How many positions each layer sees; empty where all see all."""
    gemma3 = architecture == "gemma3"
    window = fields.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    if architecture not in ("llama", "gemma3") and 0 < window < context:
        raise fields.unsupported("attention.sliding_window", window, "it is not supported")
    if gemma3 and window == 0:
        raise fields.wrong("attention.sliding_window", window or None, "Gemma 3 has windows")
    if not gemma3:
        return (window,) * layers if 0 < window < context else ()
    window = min(window, context)
    pattern = fields.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # by layer, whether it has the window
        if len(pattern) != layers or not all(isinstance(flag, bool) for flag in pattern):
            raise fields.wrong(
                "attention.sliding_window_pattern", pattern, f"it must be {layers} booleans"
            )
        return tuple(window if flag else 0 for flag in pattern)
    every = fields.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, _GEMMA3_PATTERN)
    return tuple(window if (layer + 1) % every else 0 for layer in range(layers))


def _vocab_size(file: GGUFFile, fields: Fields) -> int:
    """The embedding's rows, which `vocab_size` and the token list may not contradict."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    rows = embedding.shape[0]
    if rows > MAX_VOCAB:
        raise CheckpointError(
            f"{file.path}: 'token_embd.weight' has {rows} rows, above the limit of {MAX_VOCAB}"
        )
    fields.only("vocab_size", rows, why=f"but 'token_embd.weight' has {rows} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but"
            f" 'token_embd.weight' has {rows} rows"
        )
    return rows


def _rope(file: GGUFFile, fields: Fields, head_dim: int) -> RopeSpec:
    fields.only(
        "rope.dimension_count",
        head_dim,
        why=f"a head has {head_dim} elements, and rotating a part of them is not supported",
    )
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise fields.unsupported("rope.scaling.type", kind, "only none and linear are supported")
    factor = 1.0
    for key in ("rope.scale_linear", "rope.scaling.factor"):  # the older name and its successor
        if fields.value(key) not in (None, 0, 0.0):
            factor = fields.real(key)
    return RopeSpec(
        dim=head_dim,
        theta=fields.real("rope.freq_base", 10000.0),
        linear_factor=1.0 if kind == "none" else factor,
        divisors=_divisors(file, head_dim),
    )


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    storage: MappedStorage | None = file.tensors.get(ROPE_DIVISORS)
    if storage is None:
        return None
    if storage.shape != (head_dim // 2,) or BLOCK_TYPES[storage.type_id].elements > 1:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_DIVISORS!r} is {storage.type_name} of shape"
            f" {storage.shape}, not floats of shape {(head_dim // 2,)}"
        )
    divisors = tuple(storage.dequantize().tolist())
    if not all(math.isfinite(value) and value > 0 for value in divisors):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_DIVISORS!r} has values that are not finite and above 0"
        )
    return divisors


def _end_tokens(file: GGUFFile, tokenizer: Fields, vocab: int) -> tuple[int, ...]:
    """Every token that ends a sequence: those with a key, then those known by their text."""
    ids: dict[int, None] = {}
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = tokenizer.token(key, vocab)
        if token is not None:
            ids[token] = None
    for token, text in _control_tokens(file.metadata).items():
        if text in _END_TOKENS:
            ids[token] = None
    return tuple(ids)


def _control_tokens(metadata: Mapping[str, object]) -> dict[int, object]:
    """Texts of control and user-defined tokens by id."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return {}
    return {
        token: text
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    }


def _refuse_the_rest(fields: Fields) -> None:
    fields.only("expert_count", 0, why="mixtures of experts are not supported")
    fields.only("expert_used_count", 0, why="mixtures of experts are not supported")
    fields.only("use_parallel_residual", False)
    fields.only("attention.causal", True)
    fields.only("rope.scaling.attn_factor", 1.0)
    fields.finish(_UNUSED_KEYS)
