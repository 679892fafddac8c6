"""The C++ back end: packed weights, kernels per instruction set, one call a step."""

from __future__ import annotations

import functools


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
