"""What a model is, in the terms every architecture file reads."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.models.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and constants of a decoder-only transformer.

    Attributes:
        architecture: "llama" or "qwen2".
        context_length: positions the model was trained for, prompt and output together.
        tie_word_embeddings: the output head is the embedding.
        attention_bias: q, k and v projections have a bias.
        bos_token_id: put before a text prompt where the tokenizer asks for it.
        eos_token_ids: any of them ends a sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
