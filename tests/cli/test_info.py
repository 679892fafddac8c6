"""`trimaran info`: the machine, and a model on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.command_line import run

from trimaran import __version__
from trimaran.compute.native.backend import available_isas


def test_the_machine_as_json() -> None:
    done = run("info", "--json")
    assert done.returncode == 0
    about = json.loads(done.stdout)
    assert about["trimaran"] == __version__
    assert about["threads"] == len(os.sched_getaffinity(0))
    assert about["cpu"]
    assert about["memory_available"] > 0
    assert about["native"] == {
        "available": True,
        "reason": None,
        "instruction_sets": available_isas(),
        "chosen": available_isas()[-1],
    }
    assert about["native"]["instruction_sets"][0] == "portable"
    assert all(about["packages"].values())
    assert "model" not in about


def test_the_machine_as_text() -> None:
    done = run("info")
    assert done.returncode == 0
    assert f"trimaran                 {__version__}\n" in done.stdout
    assert f"  chosen                 {available_isas()[-1]}\n" in done.stdout


def test_a_model(tiny: list[str], tiny_path: Path) -> None:
    done = run("info", *tiny, "--max-model-len", "64", "--json")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)["model"]
    assert model["path"] == str(tiny_path)
    assert model["max_model_len"] == 64
    assert model["backend"]["backend"] == "reference"
    shown = run("info", *tiny)
    assert "  max_model_len          128\n" in shown.stdout
    assert "    backend              reference\n" in shown.stdout


def test_engine_options_without_a_model_are_refused() -> None:
    done = run("info", "--isa", "portable")
    assert done.returncode == 2
    assert "add --model" in done.stderr
