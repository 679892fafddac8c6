"""Models of the hub, fetched from a server that speaks as the hub does."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.fake_hub import fake_hub

from trimaran.core.errors import DownloadError, ModelNotFoundError
from trimaran.models.hub import fetch_from_hub

FOLDER = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": b"w" * 3000,
    "consolidated.safetensors": b"c" * 3000,
    "pytorch_model.bin": b"p" * 3000,
    "tokenizer.json": b'{"t": 1}',
    "tokenizer_config.json": b"{}",
    "README.md": b"hello",
    "onnx/model.onnx": b"o" * 3000,
}
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors",'
    b' "b": "model-00002-of-00002.safetensors"}}',
    "model-00001-of-00002.safetensors": b"1" * 100,
    "model-00002-of-00002.safetensors": b"2" * 100,
    "tokenizer.json": b"{}",
}
ONE_GGUF = {"tiny-q8.gguf": b"G" * 500, "config.json": b"{}", "README.md": b""}
TWO_GGUF = {"a/[Q4].gguf": b"4" * 400, "tiny-Q8.gguf": b"8" * 800}


def test_a_folder_has_what_is_read_and_nothing_else(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with fake_hub({"me/folder": FOLDER}) as hub:
        path = fetch_from_hub(
            "me/folder",
            endpoint=hub.url,
            cache_dir=tmp_path,
            progress=lambda done, total: reports.append((done, total)),
        )
        names = {file.name for file in path.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (path / "model.safetensors").read_bytes() == b"w" * 3000
    total = sum(len(FOLDER[name]) for name in names)
    assert reports[-1] == (total, total)
    assert all(done <= total == given for done, given in reports)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_shards_come_with_their_index(tmp_path: Path) -> None:
    with fake_hub({"me/sharded": SHARDED}) as hub:
        path = fetch_from_hub("me/sharded", endpoint=hub.url, cache_dir=tmp_path)
    assert {file.name for file in path.iterdir()} == set(SHARDED)


def test_the_only_gguf_file(tmp_path: Path) -> None:
    with fake_hub({"me/gguf": ONE_GGUF}) as hub:
        path = fetch_from_hub("me/gguf", endpoint=hub.url, cache_dir=tmp_path)
        assert hub.served == ["tiny-q8.gguf"]
    assert path.read_bytes() == b"G" * 500


def test_one_of_several_gguf_files(tmp_path: Path) -> None:
    with fake_hub({"me/two": TWO_GGUF}) as hub:
        with pytest.raises(ModelNotFoundError, match=r"2 GGUF files.*me/two/a/\[Q4\]\.gguf"):
            fetch_from_hub("me/two", endpoint=hub.url, cache_dir=tmp_path)
        with pytest.raises(ModelNotFoundError, match=r"tiny-Q9\.gguf.*mean 'tiny-Q8\.gguf'"):
            fetch_from_hub("me/two/tiny-Q9.gguf", endpoint=hub.url, cache_dir=tmp_path)
        assert hub.served == []
        path = fetch_from_hub("me/two/a/[Q4].gguf", endpoint=hub.url, cache_dir=tmp_path)
        assert hub.served == ["a/[Q4].gguf"]
    assert path.read_bytes() == b"4" * 400


@pytest.mark.parametrize(
    ("name", "files"),
    [("me/folder", FOLDER), ("me/sharded", SHARDED), ("me/gguf", ONE_GGUF)],
)
def test_what_is_cached_needs_no_network(
    name: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    with fake_hub({name: files}) as hub:
        before = fetch_from_hub(name, endpoint=hub.url, cache_dir=tmp_path)
        served = list(hub.served)
        assert fetch_from_hub(name, endpoint=hub.url, cache_dir=tmp_path) == before
        assert hub.served == served
    assert fetch_from_hub(name, endpoint=_nowhere(), cache_dir=tmp_path) == before


def test_no_network_and_nothing_cached(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"me/folder.*network.*give the path"):
        fetch_from_hub("me/folder", endpoint=_nowhere(), cache_dir=tmp_path)


def test_no_network_and_a_shard_missing(tmp_path: Path) -> None:
    with fake_hub({"me/sharded": SHARDED}) as hub:
        path = fetch_from_hub("me/sharded", endpoint=hub.url, cache_dir=tmp_path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DownloadError, match="me/sharded"):
        fetch_from_hub("me/sharded", endpoint=_nowhere(), cache_dir=tmp_path)


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    refused = {"me/gated": (403, "GatedRepo"), "me/broken": (500, "")}
    with fake_hub({"me/none": {"README.md": b""}}, refused) as hub:
        for name, error, match in (
            ("me/gated", DownloadError, "accepted its terms.*hf auth login"),
            ("me/absent", ModelNotFoundError, "no model me/absent.*hf auth login"),
            ("me/none", ModelNotFoundError, "neither config.json"),
            ("me/broken", DownloadError, "me/broken could not be fetched"),
            ("me--x/..y", ModelNotFoundError, "no name of the hub"),
        ):
            with pytest.raises(error, match=match):
                fetch_from_hub(name, endpoint=hub.url, cache_dir=tmp_path)


def _nowhere() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
