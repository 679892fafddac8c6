"""From a path to a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_files import (
    folder_config,
    gguf_keys,
    gguf_tensors,
    shard,
    tiny_folder,
    tiny_gguf,
    tiny_tensors,
    write_gguf,
)

from trimaran.core.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from trimaran.models.load import load_checkpoint


def test_both_formats_give_the_same_model(tmp_path: Path) -> None:
    for name, architecture in (("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2")):
        file = load_checkpoint(tiny_gguf(tmp_path / "f.gguf", architecture))
        folder = load_checkpoint(tiny_folder(tmp_path / "m", architecture=name))
        assert set(file.model.weights) == set(folder.model.weights)
        for key, weight in file.model.weights.items():
            np.testing.assert_array_equal(weight.values(), folder.model.weights[key].values())
        assert folder.config == replace(
            file.config, eos_token_ids=(2,), rms_norm_eps=folder_config()["rms_norm_eps"]
        )


def test_a_file_and_a_folder_with_one_file(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny-q8.gguf")
    checkpoint = load_checkpoint(path)
    assert (checkpoint.path, checkpoint.name) == (path, "tiny-q8")
    assert checkpoint.metadata is not None
    assert checkpoint.metadata["general.name"] == "tiny"
    within = load_checkpoint(str(tmp_path))
    assert (within.path, within.fingerprint) == (path, checkpoint.fingerprint)


def test_a_folder_with_a_config_beside_a_gguf_file(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    tiny_gguf(folder / "f.gguf")
    assert load_checkpoint(folder).metadata is None
    (folder / "model.safetensors").unlink()
    assert load_checkpoint(folder).metadata is not None


def test_names(tmp_path: Path) -> None:
    assert load_checkpoint(tiny_folder(tmp_path / "own-model")).name == "own-model"
    snapshots = tmp_path / "models--some--model-1b" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = tiny_folder(snapshots / "0123abc")
    assert load_checkpoint(folder).name == "some/model-1b"


def test_files_of_a_hub_cache_are_links(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    shard(folder, tiny_tensors(), 2)
    linked = tmp_path / "linked"
    linked.mkdir()
    for index, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / f"blob{index}")
        (linked / path.name).symlink_to(tmp_path / f"blob{index}")
    assert len(load_checkpoint(linked).model.weights) == len(tiny_tensors())


def test_what_leads_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        load_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a GGUF file"):
        load_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter"):
        load_checkpoint(tmp_path)


def test_one_of_several_files_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a-q4.gguf", "b-q8.gguf"):
        tiny_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a-q4\.gguf, b-q8\.gguf\)"):
        load_checkpoint(tmp_path)


def test_a_file_of_weights_alone(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match="give the folder"):
        load_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        load_checkpoint(folder / "config.json")


def test_an_unknown_architecture_is_named_with_those_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "f.gguf", gguf_keys("qwen3"), {})
    with pytest.raises(UnsupportedModelError, match=r"'qwen3' is not supported; .* llama, qwen2"):
        load_checkpoint(path)


def test_errors_about_tensors_name_the_file(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_tensors())
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "f.gguf", gguf_keys(), tensors)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)


def test_the_fingerprint_follows_what_is_in_the_file(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "f.gguf")
    first = load_checkpoint(path).fingerprint
    assert len(first) == 64
    copy = Path(shutil.copy(path, tmp_path / "other.gguf"))
    os.utime(copy, (0, 0))
    assert load_checkpoint(copy).fingerprint == first
    fingerprints = {first}
    for keys in ({"general.name": "else"}, {"llama.context_length": 64}):
        fingerprints.add(load_checkpoint(tiny_gguf(copy, keys=keys)).fingerprint)
    content = path.read_bytes()
    last = 4 * tiny_tensors()["lm_head.weight"].size  # its middle and its end are sampled
    for place in (len(content) - 1, len(content) - last // 2):
        changed = bytearray(content)
        changed[place] ^= 1
        copy.write_bytes(changed)
        fingerprints.add(load_checkpoint(copy).fingerprint)
    folder = tiny_folder(tmp_path / "m")
    fingerprints.add(load_checkpoint(folder).fingerprint)
    fingerprints.add(load_checkpoint(tiny_folder(folder, dtype="BF16")).fingerprint)
    fingerprints.add(load_checkpoint(tiny_folder(folder, {"rope_theta": 1.5})).fingerprint)
    assert len(fingerprints) == 8


def test_smollm2_is_loaded_within_its_share_of_the_start(smollm2_path: Path) -> None:
    """Of processor time, best of three; 0.06 s is usual."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        checkpoint = load_checkpoint(smollm2_path)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.4
    assert len(checkpoint.model.weights) == 272


def test_loading_smollm2_holds_no_weights_in_memory(smollm2_path: Path) -> None:
    tracemalloc.start()
    checkpoint = load_checkpoint(smollm2_path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(checkpoint.model.weights) == 272
    assert peak < 16 << 20, (held, peak)


def test_smollm2_has_a_tokenizer_and_a_template(smollm2_path: Path) -> None:
    checkpoint = load_checkpoint(smollm2_path)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template()
    assert tokenizer.decode(tokenizer.encode("Zwölf 🚢")) == "Zwölf 🚢"
    assert tokenizer.eos_token_id in checkpoint.config.eos_token_ids
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert "<|im_start|>user\nHi<|im_end|>" in text


def test_errors_about_a_tokenizer_name_the_file(tmp_path: Path) -> None:
    for keys in ({"tokenizer.ggml.model": None}, {"tokenizer.ggml.pre": "unheard-of"}):
        path = tiny_gguf(tmp_path / "f.gguf", keys=keys)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path).tokenizer()
        assert str(caught.value).count(str(path)) == 1
        assert next(iter(keys)) in str(caught.value)


def test_a_folder_has_a_tokenizer_and_a_template_of_its_own(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer_json = {"model": model, "pre_tokenizer": byte_level, "decoder": byte_level}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tokenizer().encode("abb") == [2, 1]
    assert checkpoint.chat_template() is None
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    template = checkpoint.chat_template()
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == "Hi!"
