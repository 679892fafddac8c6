"""`trimaran info`: the machine, and a model on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
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


def test_calibration_of_the_machine_and_of_a_model(smollm2_path: Path) -> None:
    options = ("--kv-cache-bytes", "64MiB", "--max-model-len", "512")
    done = run("info", "--calibrate", "--json", "--model", str(smollm2_path), *options)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    backend = about["model"]["backend"]
    reads = about["calibration"]["reads"]
    assert backend["weight_bytes"] in {reading["bytes"] for reading in reads}
    assert {peak["isa"] for peak in about["calibration"]["peaks"]} == set(available_isas())
    found = about["model"]["limits"]
    assert found["context"] == 512
    assert found["decode_tokens_per_second"] == pytest.approx(
        found["bandwidth"] * 1e9 / backend["weight_bytes"]
    )
    # 30 layers of 3 heads of keys and values each: 106 million weights outside the head.
    assert backend["linear_parameters"] == 106_168_320
    assert found["prefill_tokens_per_second"] > found["decode_tokens_per_second"]


def test_calibration_as_text(tiny: list[str]) -> None:
    done = run("info", "--calibrate", *tiny)
    assert done.returncode == 0, done.stderr
    threads = len(os.sched_getaffinity(0))
    assert f"read 8 MiB, {threads} thread" in done.stdout
    assert "portable f32, 1 thread " in done.stdout
    assert "limits of this model" not in done.stdout  # the reference back end packs nothing
