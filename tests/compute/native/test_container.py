"""The file of a built model, by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.compute.native import _native
from trimaran.compute.native.container import Container, write_container
from trimaran.core.errors import BuildError

PIECE = 4 << 20


@pytest.mark.parametrize("sizes", [[], [1], [64, 0, 65], [PIECE - 64, 64, 1], [2 * PIECE + 5, 3]])
def test_what_is_written_is_read(tmp_path: Path, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    sections = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    path = tmp_path / "c"
    write_container(path, {"text": "ü", "number": 0.1}, sections)
    container = Container.open(path)
    assert container.header["text"] == "ü"
    assert container.header["number"] == 0.1
    data = container.read_data(threads=2).array()
    at = 0
    for section in sections:
        np.testing.assert_array_equal(data[at : at + section.size], section)
        at += -(-section.size // 64) * 64
    assert at == data.size
    assert container.data_at % 4096 == 0


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_container(tmp_path / "c", {}, [])
    with pytest.raises(FileExistsError):
        write_container(tmp_path / "c", {}, [])


@given(st.binary(max_size=300), st.data())
def test_a_checksum_sees_every_changed_byte(content: bytes, data: st.DataObject) -> None:
    before = np.frombuffer(content, np.uint8)
    sums = {_native.checksum(before), _native.checksum(np.append(before, np.uint8(0)))}
    assert len(sums) == 2
    if content:
        after = before.copy()
        after[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        assert _native.checksum(after) not in sums
        assert _native.checksum(before[:-1]) not in sums


def test_a_checksum_sees_the_order() -> None:
    words = np.arange(64, dtype=np.uint64)
    swapped = words.copy()
    swapped[[3, 19]] = swapped[[19, 3]]
    sums = {
        _native.checksum(values.view(np.uint8)) for values in (words, swapped, words[::-1].copy())
    }
    assert len(sums) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: it has 0 bytes"),
        (b"TRIMARAN", "truncated: it has 8 bytes"),
        (b"GGUF" + bytes(100), "is not a built model"),
        (b"TRIMARAN" + bytes([2]) + bytes(100), "format 2, and this Trimaran reads format 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    with pytest.raises(BuildError, match=message):
        Container.open(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="can't be read: No such file"):
        Container.open(tmp_path / "c")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_container(path, {}, [np.zeros(PIECE + 1, np.uint8)])
    container = Container.open(path)
    with path.open("r+b") as file:
        file.truncate(container.data_at + PIECE)
    with pytest.raises(BuildError, match="truncated"):
        container.read_data(threads=2)
