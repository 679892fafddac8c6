"""An encoder's folder: what it says is honoured, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.encoder_folder import is_encoder, load_encoder
from trimaran.models.load import load_checkpoint


@pytest.fixture
def folder(minilm_path: Path, tmp_path: Path) -> Path:
    """all-MiniLM-L6-v2, to be changed; its weights aren't copied."""
    copy = tmp_path / "model"
    ignore = shutil.ignore_patterns("model.safetensors", "verified.json")
    shutil.copytree(minilm_path, copy, ignore=ignore)
    (copy / "model.safetensors").symlink_to(minilm_path / "model.safetensors")
    return copy


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_the_folder_says(folder: Path) -> None:
    config = load_encoder(folder).config
    assert (config.pooling, config.normalize) == ("mean", True)
    assert (config.context_length, config.num_positions) == (256, 512)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (384, 6, 12)
    change(folder / "sentence_bert_config.json", max_seq_length=9999)
    change(
        folder / "1_Pooling/config.json",
        pooling_mode_mean_tokens=False,
        pooling_mode_cls_token=True,
    )
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    config = load_encoder(folder).config
    assert (config.pooling, config.normalize, config.context_length) == ("cls", False, 512)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    fields: dict[str, Any], match: str, folder: Path
) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(UnsupportedModelError, match=match):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_hidden_layers": 7}, "encoder.layer.6"),
        ({"num_hidden_layers": 5}, "encoder.layer.5"),
        ({"vocab_size": 30000}, "word_embeddings"),
    ],
)
def test_what_cant_be_is_refused(fields: dict[str, Any], match: str, folder: Path) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(CheckpointError, match=match):
        load_encoder(folder)


def test_modules(folder: Path) -> None:
    change(folder / "1_Pooling/config.json", pooling_mode_max_tokens=True)
    with pytest.raises(UnsupportedModelError, match="pooling_mode_max_tokens"):
        load_encoder(folder)
    path = folder / "modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(UnsupportedModelError, match="Dense"):
        load_encoder(folder)
    modules[1]["path"] = "../../other"
    path.write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        load_encoder(folder)
    path.write_text("[1]")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        load_encoder(folder)
    path.unlink()
    with pytest.raises(UnsupportedModelError, match=r"no modules\.json"):
        load_encoder(folder)


def test_which_folders_are_encoders(folder: Path, smollm2_path: Path, tmp_path: Path) -> None:
    assert is_encoder(folder)
    assert not is_encoder(smollm2_path)
    assert not is_encoder(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is an encoder"):
        load_checkpoint(folder)
