"""`trimaran build`, as a process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.builds import build_file, write_native_model
from support.command_line import COMMAND, environment, run

PROMPT = ["abc", "--temperature", "0", "--max-tokens", "6", "--kv-cache-bytes", "1MiB"]
Env = dict[str, str | None]


@pytest.fixture
def env(tmp_path: Path) -> Env:
    return {"TRIMARAN_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_native_model(tmp_path))


def answer(model: str, env: Env, *flags: str) -> tuple[str, str]:
    done = run("generate", "--model", model, *PROMPT, *flags, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_build_in_a_folder(model: str, env: Env, tmp_path: Path) -> None:
    expected, _ = answer(model, env, "--weights", "int8", "--kv", "int8")
    folder = str(tmp_path / "built")
    done = run("build", model, "--weights", "int8", "--kv", "int8", "-o", folder, env=env)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{model} is built in {folder} (weights int8, KV int8, ")
    os.unlink(model)
    out, err = answer(folder, env, "--verbose")
    assert out == expected
    assert "read build" in err and "pack weights" not in err
    done = run("generate", "--model", folder, *PROMPT, "--kv", "bf16", env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "kv is 'bf16'" in done.stderr and "was built with 'int8'" in done.stderr


def test_a_build_in_the_cache(model: str, env: Env) -> None:
    expected, _ = answer(model, env)
    done = run("build", model, "--json", "-v", env=env)
    record = json.loads(done.stdout)
    assert record.keys() == {"path", "weights", "kv", "isa", "weight_bytes"}
    assert "write build" in done.stderr
    out, err = answer(model, env, "--verbose")
    assert out == expected
    assert "read cached build" in err
    assert "read cached build" not in answer(model, env, "--verbose", "--no-build-cache")[1]
    (listed,) = json.loads(run("build", "--list", "--json", env=env).stdout)
    assert (listed["source"], listed["state"]) == (model, "ready")
    line = run("build", "--list", env=env)
    assert line.stdout.split()[:2] == [Path(record["path"]).name, "as-is"]
    assert line.stderr == f"The cache is {Path(record['path']).parent}\n"
    cleaned = run("build", "--clean", env=env)
    assert cleaned.stdout.endswith(" freed\n") and not cleaned.stdout.startswith("0 ")
    assert run("build", "--list", "--json", env=env).stdout == "[]\n"


def test_two_at_once(model: str, env: Env, tmp_path: Path) -> None:
    commands = [
        [*COMMAND, "build", model],
        [*COMMAND, "build", model],
        [*COMMAND, "generate", "--model", model, *PROMPT],
        [*COMMAND, "build", model, "-o", str(tmp_path / "built")],
    ]
    running = [
        subprocess.Popen(command, env=environment(env), stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    expected, err = answer(model, env, "-v")
    assert "read cached build" in err
    assert outputs[2] == expected == answer(str(tmp_path / "built"), env)[0]
    names = [path.name for path in (tmp_path / "cache" / "builds").iterdir()]
    assert len(names) == 2 and any(name.endswith(".lock") for name in names)


def test_a_harmed_build_is_refused_with_the_reason(model: str, env: Env, tmp_path: Path) -> None:
    folder = tmp_path / "built"
    assert run("build", model, "-o", str(folder), env=env).returncode == 0
    os.truncate(build_file(folder), 3000)
    done = run("generate", "--model", str(folder), *PROMPT, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is truncated: it has 3000 of" in done.stderr
    assert "build the model again" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give one of MODEL, --list and --clean"),
        ("x --list", "give one of MODEL, --list and --clean"),
        ("--list --clean", "give one of MODEL, --list and --clean"),
        ("--clean -o y", "take no other option"),
        ("--list --weights int8", "take no other option"),
        ("x --weights int9", "weights is 'int9'"),
        ("x --kv fp8 -o y", "kv is 'fp8'"),
        ("x --kv int8", "kv is 'int8', but a build in the cache"),
        ("x --max-num-seqs 2", "unknown option '--max-num-seqs'"),
    ],
)
def test_a_wrong_command_line(words: str, message: str, env: Env) -> None:
    done = run("build", *words.split(), env=env)
    assert done.returncode == 2
    assert message in done.stderr
