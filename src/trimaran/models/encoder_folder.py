"""An encoder's folder: Hugging Face's BERT with sentence-transformers' modules.json.

Fields: https://huggingface.co/docs/transformers/model_doc/bert and
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.bert import BertModel, EncoderConfig
from trimaran.models.fields import Fields
from trimaran.models.huggingface import CONFIG_NAME
from trimaran.models.json_file import MAX_CONFIG_BYTES, read_json_object
from trimaran.models.limits import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from trimaran.models.safetensors import open_safetensors
from trimaran.models.weight import Weight

_HARMLESS = (
    "architectures",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "dtype",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "label2id",
    "model_type",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_PREFIX = "bert."


def is_encoder(path: Path) -> bool:
    """Whether a path is the folder of an encoder, by its config.json."""
    config = path / CONFIG_NAME
    if not path.is_dir() or not config.exists():
        return False
    return read_json_object(config).get("architectures") == ["BertModel"]


def load_encoder(folder: Path) -> BertModel:
    """Reads the configuration and maps the weights.

    Raises:
        CheckpointError: a file is missing or unsound, or a tensor doesn't fit.
        UnsupportedModelError: a field or module isn't implemented.
    """
    pooling, normalize = _modules(folder)
    config = _config(folder, pooling, normalize)
    weights = {
        name.removeprefix(_PREFIX): Weight(name.removeprefix(_PREFIX), storage.shape, storage)
        for file in open_safetensors(folder)
        for name, storage in file.tensors.items()
    }
    try:
        return BertModel(config, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _config(folder: Path, pooling: Literal["mean", "cls"], normalize: bool) -> EncoderConfig:
    path = folder / CONFIG_NAME
    fields = Fields(read_json_object(path), str(path))
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if hidden % heads:
        raise fields.wrong("num_attention_heads", heads, f"hidden_size {hidden} is no multiple")
    positions = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    config = EncoderConfig(
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=heads,
        num_positions=positions,
        num_types=fields.integer("type_vocab_size", 1, MAX_VOCAB),
        context_length=min(positions, _longest(folder, positions)),
        layer_norm_eps=fields.real("layer_norm_eps"),
        pooling=pooling,
        normalize=normalize,
    )
    fields.only("hidden_act", "gelu")
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    fields.finish(_HARMLESS, ("_.*",))
    return config


def _longest(folder: Path, positions: int) -> int:
    path = folder / "sentence_bert_config.json"
    if not path.exists():
        return positions
    fields = Fields(read_json_object(path), str(path))
    return fields.integer("max_seq_length", 3, MAX_CONTEXT, default=positions)


def _modules(folder: Path) -> tuple[Literal["mean", "cls"], bool]:
    """(pooling, whether vectors are normalised)."""
    path = folder / "modules.json"
    if not path.exists():
        raise UnsupportedModelError(
            f"{folder} has no modules.json, which says how the vectors of tokens become that of"
            " a text; give a sentence-transformers model"
        )
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in _list(path)]
    places = [str(module.get("path", "")) for module in _list(path)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{path} has the modules {', '.join(kinds)}; supported are Transformer, Pooling and"
            " Normalize, in this order"
        )
    if Path(places[1]).is_absolute() or ".." in Path(places[1]).parts:
        raise CheckpointError(f"{path}: the path {places[1]!r} leads out of the folder")
    pooling = folder / places[1] / CONFIG_NAME
    modes = read_json_object(pooling)
    on = [
        name for name, value in modes.items() if name.startswith("pooling_mode") and value is True
    ]
    names: Mapping[str, Literal["mean", "cls"]] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
    }
    if len(on) != 1 or on[0] not in names:
        raise UnsupportedModelError(
            f"{pooling} has {', '.join(on) or 'no mode'} on; supported is one of {', '.join(names)}"
        )
    return names[on[0]], kinds[-1] == "Normalize"


def _list(path: Path) -> list[Mapping[str, object]]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise CheckpointError(f"{path} is no list of objects")
    return found
