"""A tiny model for the commands, so that a run costs little but the start of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import write_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> list[str]:
    """Flags of an engine over the tiny model."""
    return ["--model", str(tiny_path), "--backend", "reference", "--kv-cache-bytes", "1MiB"]


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags under which an answer goes on for minutes."""
    folder = tmp_path_factory.mktemp("endless")
    path = write_tiny_model(folder, **{"llama.context_length": 1 << 20})
    engine = ["--model", str(path), "--backend", "reference", "--kv-cache-bytes", "512MiB"]
    return [*engine, "--ignore-eos", "--max-tokens", "none", "--no-skip-special-tokens"]
