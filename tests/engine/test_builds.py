"""Builds in folders and in the cache: used where they are good, built again where not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.builds import build_file, write_native_folder, write_native_model

from trimaran import LLM, EngineConfig, SamplingParams
from trimaran.compute.native import artifact
from trimaran.core.config import KV_FORMATS
from trimaran.core.errors import BackendError, BuildError, ConfigError, ModelNotFoundError
from trimaran.engine import builds, factory
from trimaran.engine.builds import BuildStore
from trimaran.engine.factory import Phases, build_model
from trimaran.models.load import load_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
FROM_CACHE = "read cached build"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own; the folder that its builds will be in."""
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "builds"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = write_native_model(tmp_path)
    os.utime(path, (1e9, 1e9))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were written just now count as written long ago."""
    monkeypatch.setattr(builds, "is_settled", lambda identity: True)


def start(model: Path, **options: Any) -> tuple[Any, dict[str, float]]:
    """(what the model answers, phases of the start-up)."""
    phases = Phases()
    with LLM(model, phases=phases, kv_cache_bytes=1 << 20, threads=1, **options) as llm:
        output = llm.generate("abc", PARAMS)[0].outputs[0]
        return (output.token_ids, output.logprobs), phases.seconds


def build(model: Path, output: Path | None = None, **options: Any) -> Path:
    return build_model(model, EngineConfig(threads=1, **options), output)[0]


def states() -> list[str]:
    return [build.state for build in BuildStore().list_builds()]


# ---------------------------------------------------------------------- in a folder


def test_a_build_needs_nothing_else(model: Path, tmp_path: Path) -> None:
    expected, _ = start(model, build_cache=False)
    with LLM(model, kv_cache_bytes=1 << 20) as llm:
        text = llm.render_chat([{"role": "user", "content": "ab"}])
    folder = build(model, tmp_path / "new" / "build")
    assert folder == tmp_path / "new" / "build"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["build"]
    model.unlink()
    moved = folder.rename(tmp_path / "moved")
    answer, phases = start(moved)
    assert answer == expected
    assert "read build" in phases and "pack weights" not in phases
    assert start(build_file(moved))[0] == expected
    with LLM(moved, kv_cache_bytes=1 << 20) as llm:
        assert llm.render_chat([{"role": "user", "content": "ab"}]) == text
        assert llm.describe()["weights"] == "as-is"


def test_a_build_of_a_folder(tmp_path: Path) -> None:
    source = write_native_folder(tmp_path / "source")
    expected, _ = start(source, weights="int8", build_cache=False)
    folder = build(source, tmp_path / "build", weights="int8")
    shutil.rmtree(source)
    assert start(folder)[0] == expected
    assert start(folder, weights="int8")[0] == expected
    with LLM(folder, kv_cache_bytes=1 << 20) as llm:
        assert llm.render_chat([{"role": "user", "content": "x"}]) == "<x>"


def kv_of(model: Path, **options: Any) -> str:
    with LLM(model, kv_cache_bytes=1 << 20, threads=1, **options) as llm:
        return str(llm.describe()["kv"])


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_build_says_how_the_kv_cache_is_held(model: Path, tmp_path: Path, kv: str) -> None:
    expected, _ = start(model, kv=kv)
    folder = build(model, tmp_path / "build", kv=kv)
    assert start(folder)[0] == start(folder, kv=kv)[0] == expected
    assert kv_of(folder) == kv_of(folder, kv=kv) == kv
    (other,) = set(KV_FORMATS) - {kv}
    with pytest.raises(BuildError, match=f"kv is '{other}', but .* was built with '{kv}'"):
        start(folder, kv=other)


def test_a_build_that_says_nothing_leaves_the_kv_cache_to_each_start(
    model: Path, tmp_path: Path
) -> None:
    folder = build(model, tmp_path / "build")
    assert [kv_of(folder), *(kv_of(folder, kv=kv) for kv in KV_FORMATS)] == ["bf16", *KV_FORMATS]
    assert start(folder, kv="int8")[0] != start(folder)[0]


def test_a_build_takes_the_place_of_an_older_one(model: Path, tmp_path: Path) -> None:
    build(model, tmp_path / "build")
    build(model, tmp_path / "build", weights="int8")
    with LLM(tmp_path / "build", kv_cache_bytes=1 << 20) as llm:
        assert llm.describe()["weights"] == "int8"
    (tmp_path / "empty").mkdir()
    build(model, tmp_path / "empty")


def test_other_folders_are_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "poem.txt").write_text("…")
    for place in (tmp_path / "mine", model):
        with pytest.raises(BuildError, match="exists and is no build"):
            build(model, place)
    assert (tmp_path / "mine" / "poem.txt").exists()


def test_a_build_is_no_source(model: Path, tmp_path: Path) -> None:
    folder = build(model, tmp_path / "build")
    with pytest.raises(BuildError, match="is a build already"):
        build(folder, tmp_path / "again")


def test_what_a_named_build_is_not_good_for(model: Path, tmp_path: Path) -> None:
    folder = build(model, tmp_path / "build")
    with pytest.raises(BuildError, match="was built with 'as-is'"):
        start(folder, weights="bf16")
    with pytest.raises(BackendError, match="built for the native kernels"):
        start(folder, backend="reference")
    content = bytearray(build_file(folder).read_bytes())
    content[-1] ^= 1
    build_file(folder).write_bytes(content)
    with pytest.raises(BuildError, match="corrupt"):
        start(folder)
    build_file(folder).unlink()
    with pytest.raises(ModelNotFoundError):
        start(build_file(folder))


def test_a_disk_that_is_full(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BuildError, match="can't be written to .*No space left"):
        build(model, tmp_path / "build")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(BuildError, match="can't be kept in .*No space left"):
        build(model)
    monkeypatch.setattr(factory, "SLOW_SECONDS", -1.0)
    start(model)
    assert list(cache.iterdir()) == []


# ---------------------------------------------------------------------- in the cache


def test_a_start_uses_the_cached_build(model: Path) -> None:
    expected, phases = start(model)
    assert FROM_CACHE not in phases
    assert states() == []
    build(model)
    assert states() == ["ready"]
    answer, phases = start(model)
    assert answer == expected
    assert FROM_CACHE in phases and "pack weights" not in phases
    assert FROM_CACHE not in start(model, build_cache=False)[1]
    assert FROM_CACHE not in start(model, backend="reference")[1]


def test_a_slow_start_keeps_its_build(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "SLOW_SECONDS", -1.0)
    expected, phases = start(model)
    assert "keep build" in phases
    answer, phases = start(model)
    assert answer == expected
    assert FROM_CACHE in phases and "keep build" not in phases


def test_options_have_builds_of_their_own(model: Path) -> None:
    build(model)
    assert FROM_CACHE not in start(model, weights="int8")[1]
    assert FROM_CACHE not in start(model, isa="portable")[1]
    build(model, weights="int8")
    assert FROM_CACHE in start(model, weights="int8")[1]
    listed = BuildStore().list_builds()
    assert {build.weights for build in listed} == {"as-is", "int8"}
    assert {build.source for build in listed} == {str(model)}
    assert listed[0].weights == "int8"  # the last used


def test_one_cached_build_serves_either_kv_cache(model: Path) -> None:
    for kv in KV_FORMATS:
        with pytest.raises(ConfigError, match=f"kv is '{kv}', but a build in the cache"):
            build(model, kv=kv)
    expected = {kv: start(model, kv=kv)[0] for kv in KV_FORMATS}
    build(model)
    for kv in KV_FORMATS:
        answer, phases = start(model, kv=kv)
        assert answer == expected[kv] and FROM_CACHE in phases
        assert kv_of(model, kv=kv) == kv
    assert kv_of(model) == "bf16"
    assert len(states()) == 1


@pytest.mark.parametrize("hides", [False, True])
def test_a_changed_model_is_built_again(model: Path, settled: None, hides: bool) -> None:
    build(model)
    assert FROM_CACHE in start(model)[1]
    before = model.stat()
    content = bytearray(model.read_bytes())
    content[-2] ^= 0x40
    model.write_bytes(content)
    if hides:
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    expected, _ = start(model, build_cache=False)
    assert "has changed since it was built" in states()[0]
    answer, phases = start(model)
    assert answer == expected
    assert FROM_CACHE not in phases and "keep build" in phases
    answer, phases = start(model)
    assert answer == expected and FROM_CACHE in phases


def test_a_touched_model_is_hashed_once(
    model: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(model)
    os.utime(model)
    hashed = []
    original = builds.read_source
    monkeypatch.setattr(builds, "read_source", lambda path: hashed.append(path) or original(path))
    assert FROM_CACHE in start(model)[1]
    assert FROM_CACHE in start(model)[1]
    assert hashed == [model]


def test_a_model_that_changed_just_now_is_not_trusted(model: Path) -> None:
    place = build(model)
    assert json.loads((place / "seen.json").read_text())["files"] is None
    assert FROM_CACHE in start(model)[1]


def test_a_chat_template_that_was_added_is_seen(tmp_path: Path, settled: None) -> None:
    source = write_native_folder(tmp_path / "source")
    build(source)
    assert FROM_CACHE in start(source)[1]
    (source / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    phases = Phases()
    with LLM(source, phases=phases, kv_cache_bytes=1 << 20) as llm:
        assert llm.render_chat([{"role": "user", "content": "x"}]) == "[x]"
    assert FROM_CACHE not in phases.seconds


def damage_data(place: Path) -> None:
    content = bytearray(build_file(place).read_bytes())
    content[-100] ^= 1
    build_file(place).write_bytes(content)


def truncate(place: Path) -> None:
    os.truncate(build_file(place), 5000)


def remove_text(place: Path) -> None:
    (place / "gguf-metadata.bin").unlink()


def empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def swap_in_another(place: Path) -> None:
    model = Path(json.loads((place / "seen.json").read_text())["path"])
    other = build(model, weights="bf16")
    shutil.copy(build_file(other), build_file(place))


@pytest.mark.parametrize("harm", [damage_data, truncate, remove_text, empty, swap_in_another])
def test_a_harmed_build_is_built_again(model: Path, harm: Any) -> None:
    expected, _ = start(model, build_cache=False)
    harm(build(model))
    answer, phases = start(model)
    assert answer == expected
    assert FROM_CACHE not in phases and "keep build" in phases
    answer, phases = start(model)
    assert answer == expected and FROM_CACHE in phases


def test_a_build_of_another_version_is_built_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(model)
    for version, expected in (("1", ["ready", "stale"]), ("2", ["ready", "stale"])):
        monkeypatch.setattr(artifact, "maker", lambda version=version: version * 64)
        assert "keep build" in start(model)[1]
        assert FROM_CACHE in start(model)[1]
        assert [state if state == "ready" else "stale" for state in states()] == expected
    monkeypatch.setattr(artifact, "maker", lambda: "1" * 64)
    assert FROM_CACHE in start(model)[1]


def test_a_build_that_names_another_version_is_built_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build(model)
    monkeypatch.setattr(artifact, "maker", lambda: "1" * 64)
    old.rename(old.with_name(old.name[:-8] + "1" * 8))
    assert "is stale" in states()[0]
    assert "keep build" in start(model)[1]
    assert states() == ["ready"]


def test_a_model_that_changes_while_it_is_built(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builds.read_source

    def change_then_read(path: Path) -> Any:
        os.utime(path)
        return original(path)

    monkeypatch.setattr(builds, "read_source", change_then_read)
    with pytest.raises(BuildError, match="changed while it was built"):
        build(model)
    assert states() == []


def test_a_cache_that_cannot_be_written(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = start(model)
    place = build(model)
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(cache)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", lambda *_: read_only(cache, os.O_RDWR))
    answer, phases = start(model)  # what is there can be used
    assert answer == expected and FROM_CACHE in phases
    truncate(place)
    assert start(model)[0] == expected


def test_a_cache_where_there_can_be_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(factory, "SLOW_SECONDS", -1.0)
    assert "keep build" in start(model)[1]
    assert (states(), BuildStore().clean()) == ([], 0)
    with pytest.raises(BuildError, match="can't be kept in .*Not a directory"):
        build(model)


def test_what_was_used_longest_ago_goes_first(model: Path, cache: Path) -> None:
    first, second = build(model), build(model, weights="bf16")
    os.utime(first, (2e9, 2e9))
    size = sum(path.stat().st_size for path in first.rglob("*"))
    seen = builds.identity(model)
    with LLM(model, weights="int8", kv_cache_bytes=1 << 20) as llm:
        built = llm._core.backend.built  # type: ignore[attr-defined]
        checkpoint = load_checkpoint(model)
        third = BuildStore(max_bytes=size + built.nbytes).save(model, built, checkpoint, seen)
        assert first.exists() and third.exists() and not second.exists()
        with pytest.raises(BuildError, match="are the most that builds may take"):
            BuildStore(max_bytes=100).save(model, built, checkpoint, seen)
    assert first.exists() and third.exists()


def test_cleaning_frees_everything(model: Path, cache: Path) -> None:
    build(model)
    (cache / ".building-left").mkdir()
    (cache / ".building-left" / "half").write_bytes(bytes(1000))
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert BuildStore().clean() == size
    assert list(cache.iterdir()) == []
    assert BuildStore().clean() == 0


def test_what_a_killed_process_left_goes_after_a_day(model: Path, cache: Path) -> None:
    for name in (".building-old", ".building-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / ".building-old", (1e9, 1e9))
    build(model)
    assert not (cache / ".building-old").exists()
    assert (cache / ".building-new").exists()
