"""The header of a GGUF file is believed only after it has been checked."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.corruption import load_corrupted
from support.tiny_files import Sound, tiny_gguf, write_gguf

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models.gguf import BLOCK_TYPES, GGUFFile

F32, Q4_0 = 0, 2


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def build(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def open_bytes(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "file.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


def test_block_types_are_those_of_the_package() -> None:
    for number, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == block.name
        assert gguf.GGML_QUANT_SIZES[kind] == (block.elements, block.size)


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)
@pytest.mark.parametrize("shape", [(3, 512), (2, 5, 256)])
def test_values_of_every_block_type(tmp_path: Path, number: int, shape: tuple[int, ...]) -> None:
    """Any bytes are valid blocks, so random ones cover every code and scale."""
    block = BLOCK_TYPES[number]
    size = int(np.prod(shape)) // block.elements * block.size
    stored = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    file = open_bytes(tmp_path, build((), (tensor("w", shape[::-1], number),), stored.tobytes()))
    storage = file.tensors["w"]
    assert (storage.type_name, storage.shape) == (block.name, shape)
    assert storage.raw().shape == (shape[0], size // shape[0])
    np.testing.assert_array_equal(storage.raw().reshape(-1), stored)
    with np.errstate(all="ignore"):
        values = storage.dequantize()
        rows = stored.reshape(*shape[:-1], -1)
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType(number))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected.reshape(shape))


@pytest.mark.parametrize("number", [2, 8, 14])
def test_values_of_a_tensor_of_several_pieces(tmp_path: Path, number: int) -> None:
    block = BLOCK_TYPES[number]
    rows, width = 333, 768
    size = rows * width // block.elements * block.size
    stored = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    file = open_bytes(tmp_path, build((), (tensor("w", (width, rows), number),), stored.tobytes()))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored.reshape(rows, -1), gguf.GGMLQuantizationType(number))
        np.testing.assert_array_equal(file.tensors["w"].dequantize(), expected)


def test_metadata_is_what_was_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    scalars: dict[str, tuple[Any, Any]] = {
        "u8": (gguf.GGUFValueType.UINT8, 255),
        "i8": (gguf.GGUFValueType.INT8, -128),
        "u16": (gguf.GGUFValueType.UINT16, 65535),
        "i16": (gguf.GGUFValueType.INT16, -32768),
        "u32": (gguf.GGUFValueType.UINT32, 2**32 - 1),
        "i32": (gguf.GGUFValueType.INT32, -(2**31)),
        "u64": (gguf.GGUFValueType.UINT64, 2**64 - 1),
        "i64": (gguf.GGUFValueType.INT64, -(2**63)),
        "f32": (gguf.GGUFValueType.FLOAT32, 0.5),
        "f64": (gguf.GGUFValueType.FLOAT64, 0.1),
        "yes": (gguf.GGUFValueType.BOOL, True),
        "no": (gguf.GGUFValueType.BOOL, False),
        "text": (gguf.GGUFValueType.STRING, "größer 🚢\n"),
    }
    arrays: dict[str, tuple[Any, list[Any]]] = {
        "strings": (gguf.GGUFValueType.STRING, ["a", "ü", "🚢"]),
        "i32s": (gguf.GGUFValueType.INT32, [1, -2, 3]),
        "f32s": (gguf.GGUFValueType.FLOAT32, [0.25, -1.0]),
        "bools": (gguf.GGUFValueType.BOOL, [True, False]),
    }
    for name, (kind, value) in scalars.items():
        writer.add_key_value(name, value, kind)
    for name, (kind, values) in arrays.items():
        writer.add_key_value(name, values, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile.open(tmp_path / "file.gguf").metadata
    expected = {name: value for name, (_, value) in (scalars | arrays).items()}
    assert dict(metadata) == {"general.architecture": "llama", **expected}
    assert all(type(metadata[name]) is type(value) for name, value in expected.items())
    assert metadata["strings"] is metadata["strings"]
    assert "absent" not in metadata and metadata.get("absent") is None


def test_an_empty_array_and_a_file_without_tensors(tmp_path: Path) -> None:
    content = build((key("none", 9, struct.pack("<IQ", 8, 0)),))
    file = open_bytes(tmp_path, content)
    assert file.metadata["none"] == [] and not file.tensors


def test_alignment_of_the_file_is_kept_to(tmp_path: Path) -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    keys = (key("general.alignment", 4, struct.pack("<I", 256)),)
    file = open_bytes(tmp_path, build(keys, (tensor("w", (4,)),), data, alignment=256))
    assert file.tensors["w"].dequantize().tolist() == [0, 1, 2, 3]


def test_opening_reads_and_copies_no_weights(tmp_path: Path) -> None:
    size = 64 << 20
    header = build((), (tensor("w", (1 << 12, size >> 14)),))
    path = tmp_path / "file.gguf"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    tracemalloc.start()
    opened = GGUFFile.open(path)
    assert opened.tensors["w"].raw().shape == (size >> 14, 1 << 14)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


HUGE = 1 << 62
PROBLEMS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(64), "PNG image"),
    "pickle": (b"\x80\x04\x95" + bytes(64), "pickle"),
    "torch": (b"PK\x03\x04" + bytes(64), "ZIP archive"),
    "html": (b"<!DOCTYPE html><html>" + bytes(64), "HTML page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a": 1}' + bytes(64), "safetensors"),
    "text": (b"hello world, this is no model", "not a GGUF file"),
    "short magic": (b"GG", "not a GGUF file"),
    "magic only": (b"GGUF", "ends within the version"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "ends within the number of tensors"),
    "tensor count": (build(tensor_count=HUGE), "number of tensors"),
    "key count": (build(key_count=HUGE), "number of metadata keys"),
    "more keys than there are": (build(key_count=9), "ends within"),
    "more tensors than there are": (build(tensor_count=9), "ends within"),
    "key length": (build((struct.pack("<Q", HUGE),)), "above the limit"),
    "key not UTF-8": (build((key("x", 0, b"\1").replace(b"x", b"\xff"),)), "not UTF-8"),
    "value length": (build((key("k", 8, struct.pack("<Q", HUGE)),)), "ends within"),
    "value not UTF-8": (build((key("k", 8, string(b"\xff")),)), "not UTF-8"),
    "value type": (build((key("k", 13, b""),)), "unknown type 13"),
    "boolean": (build((key("k", 7, b"\2"),)), "boolean of value 2"),
    "key twice": (build((key("k", 0, b"\1"), key("k", 0, b"\1"))), "'k' comes twice"),
    "array of arrays": (
        build((key("k", 9, struct.pack("<IQ", 9, 1)),)),
        "elements of unknown type 9",
    ),
    "numbers without end": (build((key("k", 9, struct.pack("<IQ", 4, HUGE)),)), "ends within"),
    "strings without end": (build((key("k", 9, struct.pack("<IQ", 8, HUGE)),)), "ends within"),
    "string past the end": (
        build((key("k", 9, struct.pack("<IQQ", 8, 1, HUGE)),)),
        "ends within the array 'k'",
    ),
    "alignment 0": (build((key("general.alignment", 4, bytes(4)),)), "general.alignment is 0"),
    "alignment 24": (
        build((key("general.alignment", 4, struct.pack("<I", 24)),)),
        "general.alignment is 24",
    ),
    "alignment text": (build((key("general.alignment", 8, string("x")),)), "alignment is 'x'"),
    "no dimensions": (build((), (tensor("w", ()),)), "0 dimensions"),
    "five dimensions": (build((), (tensor("w", (1,) * 5),)), "5 dimensions"),
    "many dimensions": (build((), (string("w") + b"\xff" * 4,)), "4294967295 dimensions"),
    "empty shape": (build((), (tensor("w", (4, 0)),)), "has shape (0, 4)"),
    "block type gone": (build((), (tensor("w", (32,), 4),), bytes(64)), "block type 4 (unknown)"),
    "block type no weight": (build((), (tensor("w", (32,), 9),), bytes(64)), "9 (Q8_1)"),
    "integers": (build((), (tensor("w", (8,), 26),), bytes(64)), "26 (I32)"),
    "parts of blocks": (build((), (tensor("w", (33,), Q4_0),), bytes(64)), "does not divide"),
    "past the end": (build((), (tensor("w", (9,)),), bytes(32)), "truncated?"),
    "huge shape": (build((), (tensor("w", (HUGE, HUGE)),), bytes(32)), "truncated?"),
    "huge offset": (build((), (tensor("w", (8,), F32, HUGE),), bytes(32)), "truncated?"),
    "misaligned": (build((), (tensor("w", (1,), F32, 4),), bytes(32)), "no multiple of 32"),
    "overlap": (
        build((), (tensor("v", (16,)), tensor("w", (8,), F32, 32)), bytes(64)),
        "'w' overlaps",
    ),
    "same place": (build((), (tensor("v", (8,)), tensor("w", (8,))), bytes(64)), "overlaps"),
    "tensor twice": (
        build((), (tensor("w", (8,)), tensor("w", (8,), F32, 32)), bytes(64)),
        "'w' comes twice",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_has_its_error(tmp_path: Path, name: str) -> None:
    content, expected = PROBLEMS[name]
    with pytest.raises(CheckpointError) as caught:
        open_bytes(tmp_path, content)
    assert expected in str(caught.value)
    assert str(tmp_path / "file.gguf") in str(caught.value)


@pytest.mark.parametrize("name", ["version 4", "big-endian", "block type gone", "integers"])
def test_what_is_sound_but_unknown_is_told_apart(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError):
        open_bytes(tmp_path, PROBLEMS[name][0])


def test_an_element_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    values = struct.pack("<IQ", 8, 2) + string("fine") + string(b"\xff\xfe")
    file = open_bytes(tmp_path, build((key("tokens", 9, values),)))
    with pytest.raises(CheckpointError, match="element 1 of tokens is not UTF-8"):
        file.metadata["tokens"]


def test_every_truncation_is_found(tmp_path: Path) -> None:
    content = tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    whole = GGUFFile.open(tmp_path / "whole.gguf")
    last = next(reversed(whole.tensors.values()))
    used = content.rindex(last.data.tobytes()) + last.data.size
    cuts = [*range(0, whole.header.size, 7), *range(whole.header.size, used, 997), used - 1]
    for cut in cuts:
        with pytest.raises(CheckpointError):
            open_bytes(tmp_path, content[:cut])
    assert len(open_bytes(tmp_path, content[:used]).tensors) == len(whole.tensors)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    path = tiny_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")
    return Sound(path, path, path.read_bytes(), GGUFFile.open(path).header.size)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_corrupt_file_loads_or_is_refused(sound: Sound, data: st.DataObject) -> None:
    load_corrupted(sound, data, st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_headers_are_refused(sound: Sound, tail: bytes) -> None:
    sound.file.write_bytes(b"GGUF" + struct.pack("<I", 3) + tail)
    try:
        assert not GGUFFile.open(sound.path).tensors
    except CheckpointError as error:
        assert str(sound.path) in str(error)


def test_writer_and_reader_agree_on_a_quantised_model(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    values = random.normal(size=(5, 64)).astype(np.float32)
    kinds = [
        gguf.GGMLQuantizationType[name]
        for name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    ]
    path = write_gguf(
        tmp_path / "file.gguf",
        {"general.architecture": "llama"},
        {kind.name: values for kind in kinds},
        {kind.name: kind for kind in kinds},
    )
    tensors = GGUFFile.open(path).tensors
    for kind in kinds:
        expected = gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(tensors[kind.name].dequantize(), expected)
