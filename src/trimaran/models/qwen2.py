"""Qwen2 and Qwen2.5: Llama's decoder with biases in q, k and v, and in those only."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.models.config import ModelConfig
from trimaran.models.decoder import Decoder, decoder_tensors
from trimaran.models.weight import Weight

_BIASED = "qkv"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by canonical name."""
    return decoder_tensors(config, _BIASED)


class Qwen2Model(Decoder):
    """Architecture "qwen2"."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        """Raises CheckpointError, naming a tensor that is missing, superfluous or misshaped."""
        super().__init__(config, weights, _BIASED)
