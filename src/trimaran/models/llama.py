"""Llama and models of the same computation, such as SmolLM2 and Mistral."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.models.config import ModelConfig
from trimaran.models.decoder import Decoder, decoder_tensors
from trimaran.models.weight import Weight


def _biased(config: ModelConfig) -> str:
    """With `attention_bias` all four projections of an attention have one."""
    return "qkvo" if config.attention_bias else ""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by canonical name."""
    return decoder_tensors(config, _biased(config))


class LlamaModel(Decoder):
    """Architecture "llama"."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        """Raises CheckpointError, naming a tensor that is missing, superfluous or misshaped."""
        super().__init__(config, weights, _biased(config))
