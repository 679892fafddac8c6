"""What a model is, in the terms every architecture file reads."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.models.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and constants of a decoder-only transformer.

    Attributes:
        architecture: "llama", "qwen2" or "gemma3".
        context_length: positions the model was trained for, prompt and output together.
        tie_word_embeddings: the output head is the embedding.
        attention_bias: q, k and v projections have a bias.
        bos_token_id: put before a text prompt where the tokenizer asks for it.
        eos_token_ids: any of them ends a sequence.
        windows: of each layer, how many positions its attention sees, the token's own
            included; 0 where it sees all. Empty where all layers see all.
        local_rope: of the layers with a window, where it is another than `rope`.
        query_scale: factor on the scores; None is head_dim ** -0.5.
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
    windows: tuple[int, ...] = ()
    local_rope: RopeSpec | None = None
    query_scale: float | None = None

    def window(self, layer: int) -> int:
        """How many positions a layer's attention sees; 0 is all."""
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> RopeSpec:
        """The rotary embedding of a layer."""
        local = self.local_rope is not None and self.window(layer) > 0
        return self.local_rope if local and self.local_rope else self.rope

    def attention_scale(self) -> float:
        """Factor on the scores of attention."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale
