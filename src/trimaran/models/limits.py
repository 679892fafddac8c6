"""Sizes beyond which a configuration is taken for corrupt."""

from __future__ import annotations

from trimaran.core.errors import CheckpointError
from trimaran.models.config import ModelConfig

MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_LAYERS = 1 << 12
MAX_CONTEXT = 1 << 24


def check_heads(config: ModelConfig, where: str) -> None:
    """Whether heads, groups and rotary pairs come out even; `where` names the file.

    Raises:
        CheckpointError: they don't.
    """
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} query heads don't divide over"
            f" {config.num_kv_heads} key and value heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{where}: a head has {config.head_dim} elements, an odd number")
