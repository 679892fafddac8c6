"""What tests of every floor share."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.models.store import DEFAULT_MODEL, resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, fetched once and then cached as it is for users."""
    return resolve(DEFAULT_MODEL)
