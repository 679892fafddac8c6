"""Which files a model is made from, and whether they changed."""

from __future__ import annotations

import hashlib
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from support.tiny_files import shard, tiny_folder, tiny_gguf, tiny_tensors

from trimaran.core.errors import CheckpointError
from trimaran.models.source import identity, is_settled, read_source, source_files


def test_a_file_has_its_own_digest(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    for named in (path, tmp_path):
        source = read_source(named)
        assert source.sha256 == hashlib.sha256(content).hexdigest()
        assert (source.name, source.size) == ("m.gguf", len(content))


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    digests = {read_source(folder).sha256}
    identities = [identity(folder)]
    extra = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{}",
        "generation_config.json": "{}",
        "chat_template.jinja": "x",
        "additional_chat_templates/tool_use.jinja": "x",
        "config.json": "{ }",
    }
    for name, text in extra.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        digests.add(read_source(folder).sha256)
        identities.append(identity(folder))
    shard(folder, tiny_tensors(), 2)
    digests.add(read_source(folder).sha256)
    identities.append(identity(folder))
    assert len(digests) == len(extra) + 2
    assert all(a != b for a, b in pairwise(identities))
    assert len(source_files(folder)) == len(extra) + 3  # two shards and their index
    (folder / "README.md").write_text("of no account")
    assert read_source(folder).sha256 in digests


def test_a_change_shows_even_where_its_time_is_set_back(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    before, stat = identity(path), path.stat()
    assert identity(path) == before
    time.sleep(0.02)
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert identity(path) != before


def test_only_old_changes_are_settled(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    found = identity(path)
    assert not is_settled(found)
    name, size, number, *_ = found[0]
    assert is_settled([[name, size, number, 10**18, 10**18]])
    assert not is_settled([[name, size, number, 10**18, time.time_ns() + 10**12]])


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has neither"):
        source_files(tmp_path)
    for call in (identity, read_source):
        with pytest.raises(CheckpointError, match="can't be read"):
            call(tmp_path / "gone.gguf")
