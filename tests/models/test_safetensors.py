"""Safetensors files and their index are checked before anything in them is used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.corruption import load_corrupted
from support.tiny_files import (
    Sound,
    safetensors_bytes,
    shard,
    tiny_folder,
    tiny_tensors,
    write_tensors,
)

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.load import load_checkpoint
from trimaran.models.safetensors import SafetensorsFile, open_safetensors


def entry(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def open_bytes(folder: Path, content: bytes) -> SafetensorsFile:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return SafetensorsFile.open(path)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values(tmp_path: Path, dtype: str) -> None:
    random = np.random.default_rng(0)
    shapes = {"vector": (7,), "odd": (3, 5), "cube": (2, 3, 4), "one": (1,), "scalar": ()}
    tensors = {
        name: np.asarray(random.normal(size=shape), np.float32) for name, shape in shapes.items()
    }
    file = SafetensorsFile.open(write_tensors(tmp_path / "m.safetensors", tensors, dtype))
    assert list(file.tensors) == list(tensors)
    for name, values in tensors.items():
        storage = file.tensors[name]
        if dtype == "F32":
            expected = values
        elif dtype == "F16":
            expected = values.astype(np.float16).astype(np.float32)
        else:
            bits = values.reshape(-1).view(np.uint32)
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # ties to even
            expected = nearest.view(np.float32)
        assert (storage.type_name, storage.shape) == (dtype, values.shape)
        assert storage.raw().shape[0] == (values.shape[0] if values.shape else 1)
        assert storage.dequantize().dtype == np.float32
        assert storage.dequantize().flags.aligned
        np.testing.assert_array_equal(storage.dequantize(), expected.reshape(values.shape))


def test_bf16_keeps_every_bit(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    header = {"w": entry("BF16", [1 << 16], [0, 1 << 17])}
    values = open_bytes(tmp_path, safetensors_bytes(header, bits.tobytes())).tensors["w"]
    assert (values.dequantize().view(np.uint32) == bits.astype(np.uint32) << 16).all()


def test_metadata_is_allowed(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "w": entry()}
    assert list(open_bytes(tmp_path, safetensors_bytes(header, bytes(16))).tensors) == ["w"]


def raw(text: str, data: bytes = b"") -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


PROBLEMS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"\1\0\0", "not a safetensors file"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(64), "PNG image"),
    "pickle": (b"\x80\x02" + bytes(64), "pickle"),
    "torch": (b"PK\x03\x04" + bytes(64), "ZIP archive"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(64), "a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    "text": (b"hello world, this is no model", "above the limit"),
    "header size": (struct.pack("<Q", 1 << 40) + b"{}", "above the limit"),
    "truncated header": (raw('{"w": 1}')[:12], "truncated?"),
    "not JSON": (raw("{"), "not sound JSON"),
    "no object": (raw("[]"), "holds a JSON list"),
    "not UTF-8": (struct.pack("<Q", 2) + b"\xff\xff", "not sound JSON"),
    "nested": (raw("[" * 200_000), "nested too deeply"),
    "tensor twice": (
        raw('{"w": %s, "w": %s}' % ((json.dumps(entry()),) * 2), bytes(16)),
        "'w' comes twice",
    ),
    "metadata": (raw('{"__metadata__": 1}'), "__metadata__"),
    "entry": (raw('{"w": 1}'), "isn't described by"),
    "field missing": (raw('{"w": {"dtype": "F32", "shape": []}}'), "isn't described by"),
    "field unknown": (safetensors_bytes({"w": {**entry(), "x": 1}}, bytes(16)), "isn't described"),
    "dtype number": (safetensors_bytes({"w": entry(1)}, bytes(16)), "dtype"),  # type: ignore[arg-type]
    "dtype I64": (safetensors_bytes({"w": entry("I64", [2])}, bytes(16)), "'w' has dtype I64"),
    "dtype F8": (
        safetensors_bytes({"w": entry("F8_E4M3", [16])}, bytes(16)),
        "'w' has dtype F8_E4M3",
    ),
    "shape text": (safetensors_bytes({"w": entry(shape="4")}, bytes(16)), "shape"),
    "shape negative": (safetensors_bytes({"w": entry(shape=[-4])}, bytes(16)), "shape"),
    "shape boolean": (safetensors_bytes({"w": entry(shape=[True, 4])}, bytes(16)), "shape"),
    "shape fraction": (safetensors_bytes({"w": entry(shape=[4.0])}, bytes(16)), "shape"),
    "shape zero": (safetensors_bytes({"w": entry(shape=[0], offsets=[0, 0])}, b""), "shape"),
    "shape long": (safetensors_bytes({"w": entry(shape=[1] * 99)}, bytes(16)), "shape"),
    "one offset": (safetensors_bytes({"w": entry(offsets=[0])}, bytes(16)), "data_offsets"),
    "offsets back": (safetensors_bytes({"w": entry(offsets=[16, 0])}, bytes(16)), "16 to 0"),
    "past the end": (safetensors_bytes({"w": entry()}, bytes(12)), "truncated?"),
    "huge": (
        safetensors_bytes({"w": entry(shape=[1 << 60], offsets=[0, 1 << 62])}, bytes(12)),
        "truncated?",
    ),
    "bytes": (safetensors_bytes({"w": entry(shape=[3])}, bytes(16)), "has 16 bytes, not 12"),
    "overlap": (
        safetensors_bytes({"v": entry(), "w": entry(offsets=[8, 24])}, bytes(24)),
        "'w' overlaps",
    ),
    "same place": (safetensors_bytes({"v": entry(), "w": entry()}, bytes(16)), "overlaps"),
    "gap": (
        safetensors_bytes({"v": entry(), "w": entry(offsets=[20, 36])}, bytes(36)),
        "bytes 16 to 20 of the data belong to no tensor",
    ),
    "rest": (safetensors_bytes({"w": entry()}, bytes(20)), "bytes 16 to 20"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_has_its_error(tmp_path: Path, name: str) -> None:
    content, expected = PROBLEMS[name]
    with pytest.raises(CheckpointError) as caught:
        open_bytes(tmp_path, content)
    assert expected in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert isinstance(caught.value, UnsupportedModelError) == name.startswith(
        ("dtype I", "dtype F")
    )


def test_every_truncation_is_found(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    content = (folder / "model.safetensors").read_bytes()
    for cut in [*range(0, len(content), 499), len(content) - 1]:
        with pytest.raises(CheckpointError):
            open_bytes(tmp_path, content[:cut])


def test_shards_are_joined(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    tensors = tiny_tensors()
    whole = load_checkpoint(folder)
    shard(folder, tensors, 3)
    assert len(open_safetensors(folder)) == 3
    checkpoint = load_checkpoint(folder)
    assert set(checkpoint.model.weights) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.model.weights[name].values(), values)
    assert checkpoint.config == whole.config


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    names = shard(folder, tiny_tensors(), 3)
    (folder / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {names[1]}"):
        load_checkpoint(folder)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    names = shard(folder, tiny_tensors(), 2)
    content = (folder / names[1]).read_bytes()
    (folder / names[1]).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=names[1]):
        load_checkpoint(folder)


def test_an_index_that_names_other_tensors(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    first, second = shard(folder, tiny_tensors(), 2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    place = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight', which .* places nowhere"):
        load_checkpoint(folder)
    index["weight_map"]["model.norm.weight"] = first if place == second else second
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight', which .* places in model-"):
        load_checkpoint(folder)
    index["weight_map"]["model.norm.weight"] = place
    index["weight_map"]["more"] = first
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{first} lacks tensor 'more'"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "shard_name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "model.bin",
        ".safetensors",
        "..",
        "",
        "a\0.safetensors",
        7,
        None,
    ],
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, shard_name: object) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"w": shard_name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not the plain name of a safetensors file"):
        load_checkpoint(folder)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[", ""])
def test_an_unsound_index(tmp_path: Path, index: str) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=r"pickles .* convert them to safetensors"):
        load_checkpoint(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_checkpoint(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tiny_folder(tmp_path_factory.mktemp("st") / "m", dtype="BF16")
    content = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    return Sound(folder, folder / "model.safetensors", content, header)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_corrupt_file_loads_or_is_refused(sound: Sound, data: st.DataObject) -> None:
    load_corrupted(sound, data, st.sampled_from(b'0919{}[]",:-e\0\x7f\x80\xff'))
