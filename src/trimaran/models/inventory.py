"""Whether a checkpoint's tensors are exactly those its model has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trimaran.core.errors import CheckpointError, nearest
from trimaran.models.weight import Weight

Shape = tuple[int, ...]

_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Frequencies that old files carry along; they follow from the configuration."""


def consume(
    expected: Mapping[str, Shape], optional: Mapping[str, Shape], found: Mapping[str, Weight]
) -> dict[str, Weight]:
    """`found` without harmless tensors: every `expected` one, each of its shape, no other.

    Args:
        optional: tensors that may be there as well.

    Raises:
        CheckpointError: names the tensor that is missing, superfluous or of another shape.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"tensor {missing[0]!r} is missing{_and_more(missing)}; the file doesn't hold the"
            " whole model that its configuration describes"
        )
    known = {**expected, **optional}
    superfluous = [name for name in found if name not in known and not _HARMLESS.fullmatch(name)]
    if superfluous:
        raise CheckpointError(
            f"tensor {superfluous[0]!r} belongs to no part of the model"
            f"{_and_more(superfluous)}, so the model would compute something else without it."
            f"{nearest(superfluous[0], known)}"
        )
    for name, shape in known.items():
        if name in found and found[name].shape != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {found[name].shape}, but by the configuration it is"
                f" {shape}"
            )
    return {name: weight for name, weight in found.items() if name in known}


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
