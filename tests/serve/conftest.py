"""Servers that tests share: the real default model, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http_server import HttpServer, serving

FLAGS = ("--max-model-len", "2048", "--kv-cache-bytes", "512MiB", "--warmup", "1")


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[HttpServer]:
    """A server of the default model, for tests that leave it as they found it."""
    with serving("--served-model-name", "smollm2", *FLAGS) as running:
        yield running
