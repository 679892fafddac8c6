"""A model: its dimensions, its weights, and the one `forward` that every back end runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trimaran.models.config import ModelConfig
from trimaran.models.ops import Batch, Ops, T
from trimaran.models.weight import Weight


class Model(Protocol):
    """One file an architecture implements this."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Every tensor by canonical name; each is used by `forward`."""
        ...

    def forward(self, ops: Ops[T], batch: Batch[T]) -> T:
        """Logits [R, vocab] of the rows the step wants."""
        ...
