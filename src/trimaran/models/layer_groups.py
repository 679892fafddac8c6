"""Layers that see equally far back: their keys and values are kept and let go together."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one window.

    Attributes:
        window: positions that they see; 0 is all.
        layers: ascending.
    """

    window: int
    layers: tuple[int, ...]


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """A model's layers by window: those that see all first, then by window, ascending."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    return tuple(
        LayerGroup(window, tuple(layer for layer, own in enumerate(windows) if own == window))
        for window in sorted(set(windows))
    )
