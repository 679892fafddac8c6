"""A Hugging Face folder: config.json, generation_config.json, safetensors.

Fields as transformers 4 and 5 write them:
https://huggingface.co/docs/transformers/main_classes/configuration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimaran.core.errors import UnsupportedModelError, nearest
from trimaran.models.config import ModelConfig
from trimaran.models.fields import Fields
from trimaran.models.json_file import read_json_object
from trimaran.models.limits import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    check_heads,
)
from trimaran.models.rope import Llama3Scaling, RopeSpec
from trimaran.models.safetensors import SafetensorsFile, open_safetensors
from trimaran.models.weight import Weight

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Gemma3ForCausalLM": "gemma3",
}
"""Names in config.json, and which architecture computes them."""

# Fields that say nothing about the distribution a trained model computes: bookkeeping,
# training, and defaults of sampling that old files carry.
_HARMLESS = (
    "architectures",
    "attention_dropout",
    "cache_implementation",
    "chunk_size_feed_forward",
    "do_sample",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_length",
    "max_sequence_length",
    "max_window_layers",  # matters only with a sliding window
    "model_type",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # how transformers splits a product
    "problem_type",
    "return_dict",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
)
_HARMLESS_PATTERNS = ("_.*", "unsloth_.*")

_MISTRAL_WINDOW = 4096
"""What transformers takes where MistralForCausalLM's config.json doesn't say."""
_GEMMA3_PATTERN = 6
"""Every so manieth layer of Gemma 3 sees all positions."""


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A folder's configuration and tensors."""

    config: ModelConfig
    weights: Mapping[str, Weight]
    files: tuple[SafetensorsFile, ...]

    @classmethod
    def open(cls, folder: Path) -> HuggingFaceModel:
        """Reads the configuration and maps the weights.

        Raises:
            CheckpointError: a file is missing or unsound, or a field can't be.
            UnsupportedModelError: an architecture, field or dtype isn't implemented.
        """
        config = read_config(folder)
        files = open_safetensors(folder)
        less_one = config.architecture == "gemma3"  # norms are stored less 1
        weights = {
            name: Weight(
                name,
                storage.shape,
                storage,
                offset=1.0 if less_one and name.endswith("norm.weight") else 0.0,
            )
            for file in files
            for name, storage in file.tensors.items()
        }
        return cls(config, weights, files)


def read_config(folder: Path) -> ModelConfig:
    """The configuration in config.json, with the end tokens of generation_config.json.

    Raises:
        CheckpointError: a file is unsound, a field is missing or can't be.
        UnsupportedModelError: the architecture or a field isn't implemented.
    """
    path = folder / CONFIG_NAME
    fields = Fields(read_json_object(path), str(path))
    name = _architecture(fields)
    fields.only("quantization_config", why="quantised Hugging Face weights are not supported")
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    head_dim = _head_dim(fields, hidden, heads)
    context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
    layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    gemma3 = name == "Gemma3ForCausalLM"
    rope, local_rope = (
        _gemma3_ropes(fields, head_dim) if gemma3 else (_rope(fields, head_dim), None)
    )
    config = ModelConfig(
        architecture=ARCHITECTURES[name],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads),
        head_dim=head_dim,
        context_length=context,
        rms_norm_eps=fields.real("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", gemma3),
        attention_bias=_attention_bias(fields, name),
        bos_token_id=fields.token("bos_token_id", vocab),
        eos_token_ids=_end_tokens(folder, fields, vocab),
        windows=_windows(fields, name, layers, context),
        local_rope=local_rope,
        query_scale=fields.real("query_pre_attn_scalar", 256) ** -0.5 if gemma3 else None,
    )
    check_heads(config, str(path))
    _refuse_the_rest(fields, name)
    return config


def _architecture(fields: Fields) -> str:
    """The name in `architectures`, one of `ARCHITECTURES`."""
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.wrong("architectures", names, "it must be a list of one name")
    name: str = names[0]
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{fields.where}: architecture {name!r} is not supported; these are:"
            f" {', '.join(ARCHITECTURES)}.{nearest(name, ARCHITECTURES)}"
        )
    return name


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.value("head_dim") is not None:
        return fields.integer("head_dim", 1, MAX_WIDTH)
    if hidden % heads:
        raise fields.wrong("num_attention_heads", heads, f"hidden_size {hidden} is no multiple")
    return hidden // heads


def _attention_bias(fields: Fields, name: str) -> bool:
    if name == "Qwen2ForCausalLM":
        fields.only("attention_bias", True, why="Qwen2 has biases in q, k and v")
        return True
    if name == "MistralForCausalLM":
        fields.only("attention_bias", False, why="Mistral has no biases")
        return False
    if name == "Gemma3ForCausalLM":
        fields.only("attention_bias", False, why="biases are not supported in Gemma 3")
        return False
    return fields.boolean("attention_bias", False)


def _windows(fields: Fields, name: str, layers: int, context: int) -> tuple[int, ...]:
    """How many positions each layer sees; empty where all see all."""
    kinds = fields.value("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise fields.wrong("layer_types", kinds, f"it must be a list of {layers} layers")
    if name == "Gemma3ForCausalLM":
        return _gemma3_windows(fields, kinds, layers, context)
    for kind in kinds or ():
        if kind != "full_attention":
            raise fields.unsupported("layer_types", kind, "only full_attention is supported")
    if name != "MistralForCausalLM":  # the others have a switch of its own for it
        fields.value("sliding_window")
        return ()
    if fields.has("sliding_window"):
        if fields.value("sliding_window") is None:
            return ()
        window = fields.integer("sliding_window", 1, MAX_CONTEXT)
    else:
        window = _MISTRAL_WINDOW
    return (window,) * layers if window < context else ()


def _gemma3_windows(
    fields: Fields, kinds: list[object] | None, layers: int, context: int
) -> tuple[int, ...]:
    window = min(fields.integer("sliding_window", 1, MAX_CONTEXT, 4096), context)
    pattern = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, _GEMMA3_PATTERN)
    if kinds is None:
        return tuple(window if (layer + 1) % pattern else 0 for layer in range(layers))
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise fields.unsupported("layer_types", kind, f"only {' and '.join(known)} are")
    return tuple(known[str(kind)] for kind in kinds)


def _gemma3_ropes(fields: Fields, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """(of layers that see all, of those with a window): by `rope_parameters` with an entry for
    each kind of layer, or by the fields of transformers 4."""
    theta = fields.real("rope_theta", 1e6)
    local = fields.real("rope_local_base_freq", 1e4)
    scaling, parameters = fields.value("rope_scaling"), fields.value("rope_parameters")
    if parameters is None:
        rope = RopeSpec(dim=head_dim, theta=theta)
        if scaling is not None:
            rope = _nested_rope(fields, "rope_scaling", scaling, head_dim, theta)
        return rope, RopeSpec(dim=head_dim, theta=local)
    if scaling is not None:
        raise fields.wrong("rope_scaling", scaling, "rope_parameters are there as well")
    if not isinstance(parameters, dict):
        raise fields.wrong("rope_parameters", parameters, "it must be an object")
    kinds = Fields(parameters, f"{fields.where}: rope_parameters")
    ropes = [
        _nested_rope(
            kinds, kind, {} if kinds.value(kind) is None else kinds.value(kind), head_dim, base
        )
        for kind, base in (("full_attention", theta), ("sliding_attention", local))
    ]
    kinds.finish()
    return ropes[0], ropes[1]


def _nested_rope(fields: Fields, key: str, value: object, head_dim: int, theta: float) -> RopeSpec:
    """From an object with `rope_type` and perhaps a `rope_theta` of its own."""
    if not isinstance(value, dict):
        raise fields.wrong(key, value, "it must be an object")
    rope = Fields(value, f"{fields.where}: {key}")
    rope.only("partial_rotary_factor", 1, 1.0)
    spec = _scaled(rope, head_dim, rope.real("rope_theta", theta))
    rope.finish()
    return spec


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    """From `rope_theta` and `rope_scaling`, or from `rope_parameters` (transformers 5)."""
    theta = fields.value("rope_theta")
    theta = None if theta is None else fields.real("rope_theta")
    scaling = fields.value("rope_scaling")
    parameters = fields.value("rope_parameters")
    if scaling is not None and parameters is not None and scaling != parameters:
        raise fields.wrong("rope_parameters", parameters, f"but rope_scaling is {scaling!r}")
    key = "rope_scaling" if parameters is None else "rope_parameters"
    chosen = fields.value(key)
    if chosen is None:
        return RopeSpec(dim=head_dim, theta=10000.0 if theta is None else theta)
    if not isinstance(chosen, dict):
        raise fields.wrong(key, chosen, "it must be an object")
    rope = Fields(chosen, f"{fields.where}: {key}")
    nested = rope.value("rope_theta")
    if nested is not None:
        own = rope.real("rope_theta")
        if theta is not None and theta != own:
            raise rope.wrong("rope_theta", own, f"but outside it is {theta}")
        theta = own
    rope.only("partial_rotary_factor", 1, 1.0)
    spec = _scaled(rope, head_dim, 10000.0 if theta is None else theta)
    rope.finish()
    return spec


def _scaled(rope: Fields, dim: int, theta: float) -> RopeSpec:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        rope.only("factor", 1, 1.0, why="rope_type is default, which has none")
        return RopeSpec(dim=dim, theta=theta)
    if kind == "linear":
        return RopeSpec(dim=dim, theta=theta, linear_factor=rope.real("factor"))
    if kind == "llama3":
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if not low < high:
            raise rope.wrong("high_freq_factor", high, f"it must be above low_freq_factor {low}")
        original = rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
        scaling = Llama3Scaling(rope.real("factor"), low, high, original)
        return RopeSpec(dim=dim, theta=theta, llama3=scaling)
    raise rope.unsupported("rope_type", kind, "only default, linear and llama3 are supported")


def _end_tokens(folder: Path, fields: Fields, vocab: int) -> tuple[int, ...]:
    ids = dict.fromkeys(fields.tokens("eos_token_id", vocab))
    path = folder / GENERATION_NAME
    if path.exists():
        generation = Fields(read_json_object(path), str(path))
        ids |= dict.fromkeys(generation.tokens("eos_token_id", vocab))
    return tuple(ids)


def _refuse_the_rest(fields: Fields, name: str) -> None:
    """Every field that would change the computation and isn't honoured."""
    if name == "Gemma3ForCausalLM":
        fields.only("hidden_activation", "gelu_pytorch_tanh")
        fields.only("final_logit_softcapping")
        fields.only("attn_logit_softcapping")
        fields.only("use_bidirectional_attention", False)
    else:
        fields.only("hidden_act", "silu")
        fields.only("use_sliding_window", False, why="sliding windows are not supported")
    fields.only("mlp_bias", False)
    fields.only("rope_interleaved", False)
    fields.only("partial_rotary_factor", 1, 1.0)
    fields.only("use_mrope", False)
    fields.only("is_decoder", True, False)  # transformers' decoders are causal either way
    fields.only("is_encoder_decoder", False)
    fields.only("add_cross_attention", False)
    fields.finish(_HARMLESS, _HARMLESS_PATTERNS)
