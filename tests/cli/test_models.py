"""`trimaran models`: list, pull, verify, remove."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.command_line import run

from trimaran.models.catalogue import CATALOGUE, DEFAULT_MODEL
from trimaran.models.store import ModelStore

DEFAULT = next(model for model in CATALOGUE if model.name == DEFAULT_MODEL)


@pytest.fixture
def empty_cache(tmp_path: Path) -> dict[str, str | None]:
    return {"TRIMARAN_CACHE": str(tmp_path)}


@pytest.fixture
def broken_cache(empty_cache: dict[str, str | None], tmp_path: Path) -> Path:
    """A file of the right size with other contents."""
    path = tmp_path / "models" / DEFAULT.name / DEFAULT.file
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, DEFAULT.size)  # a hole: takes no room on the disk
    return path


def test_the_list(empty_cache: dict[str, str | None], tmp_path: Path) -> None:
    done = run("models", "list", env=empty_cache)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[model.name, "absent"] for model in CATALOGUE]
    assert done.stderr == f"The cache is {tmp_path / 'models'}\n"


def test_the_list_as_json(empty_cache: dict[str, str | None]) -> None:
    done = run("models", "list", "--json", env=empty_cache)
    first, *_ = json.loads(done.stdout)
    assert first.keys() == {
        "name",
        "aliases",
        "description",
        "licence",
        "size",
        "sha256",
        "state",
        "path",
    }
    assert (first["name"], first["size"], first["state"]) == (DEFAULT.name, DEFAULT.size, "absent")


def test_pulling_what_is_there_tells_where(smollm2_path: Path) -> None:
    done = run("models", "pull", DEFAULT_MODEL, "--json")
    assert done.returncode == 0
    (record,) = json.loads(done.stdout)
    assert record["name"] == DEFAULT_MODEL
    assert Path(record["path"]).stat().st_size == DEFAULT.size


def test_a_broken_model_is_found_and_removed(
    empty_cache: dict[str, str | None], broken_cache: Path
) -> None:
    verified = run("models", "verify", "--json", env=empty_cache)
    assert verified.returncode == 1
    (record,) = json.loads(verified.stdout)
    assert (record["name"], record["sound"]) == (DEFAULT_MODEL, False)
    assert f"trimaran models pull {DEFAULT_MODEL}" in verified.stderr
    removed = run("models", "remove", DEFAULT_MODEL, env=empty_cache)
    assert removed.returncode == 0
    assert removed.stdout == f"{DEFAULT_MODEL} is removed, 98.4 MB freed\n"
    assert not broken_cache.exists()
    again = run("models", "remove", DEFAULT_MODEL, env=empty_cache)
    assert again.stdout == f"{DEFAULT_MODEL} was not cached\n"


def test_one_wrong_name_leaves_the_others_alone(
    empty_cache: dict[str, str | None], broken_cache: Path
) -> None:
    done = run("models", "remove", "smolm2-135m", DEFAULT_MODEL, "--json", env=empty_cache)
    assert done.returncode == 1
    wrong, right = json.loads(done.stdout)
    assert wrong["error"]["type"] == "ModelNotFoundError"
    assert "Did you mean 'smollm2-135m'?" in done.stderr
    assert right == {"name": DEFAULT_MODEL, "freed": DEFAULT.size}
    assert ModelStore(broken_cache.parents[1]).list_models()[0].state == "absent"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lst", "there is no action 'lst'. Did you mean 'list'?"),
        ("list x", "list takes no name"),
        ("remove", "remove wants the name of a model"),
        ("list --jsn", "unknown option '--jsn'. Did you mean '--json'?"),
    ],
)
def test_a_wrong_command_line(words: str, message: str) -> None:
    done = run("models", *words.split())
    assert done.returncode == 2
    assert message in done.stderr
