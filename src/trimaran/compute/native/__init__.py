"""The C++ back end: packed weights, kernels per instruction set, one call a step."""

from __future__ import annotations

import functools
from pathlib import Path

BUILD_FILE = "build.trimaran"
"""What the folder of a built model holds, and no other folder; see `artifact.py`."""


def is_build(path: Path) -> bool:
    """Whether a path is that of a built model: its folder, or the file in it."""
    return path.name == BUILD_FILE or (path / BUILD_FILE).exists()


def is_available() -> bool:
    """Whether the kernels were compiled when the package was installed, and load here."""
    return unavailable_reason() is None


@functools.cache
def unavailable_reason() -> str | None:
    """Why the kernels can't be used, or None if they can."""
    try:
        from trimaran.compute.native import _native  # noqa: F401
    except ImportError as error:
        if "_native" in str(error) and "cannot import name" in str(error):
            return "they were not compiled when Trimaran was installed"
        return f"they don't load: {error}"
    return None
