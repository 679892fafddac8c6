"""What tests of every floor share."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.engine import factory
from trimaran.models.store import DEFAULT_MODEL, resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, fetched once and then cached as it is for users."""
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of all-MiniLM-L6-v2, an encoder, likewise."""
    return resolve("all-minilm-l6-v2")


@pytest.fixture(autouse=True)
def no_builds_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow starts of tests leave no builds in the user's cache."""
    monkeypatch.setattr(factory, "SLOW_SECONDS", float("inf"))
