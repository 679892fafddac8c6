"""Gemma 3's text model (Gemma 3 Technical Report, 2025, section 2).

x = embed(tokens) * sqrt(width)
each layer:   h = rms_norm(x)
              q, k, v = linear(h)
              q, k = rope(rms_norm(q)), rope(rms_norm(k))       a norm for each head
              x += rms_norm(o(attention(q, k, v)))
              h = rms_norm(x)
              x += rms_norm(down(gelu(gate(h)) * up(h)))
logits = head(rms_norm(x))                  the head is the embedding where they are tied

Five of six layers see a window of positions and turn by a RoPE of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trimaran.models.config import ModelConfig
from trimaran.models.decoder import EMBEDDING, FINAL_NORM, HEAD, attention_spec
from trimaran.models.inventory import Shape, consume
from trimaran.models.ops import AttentionSpec, Batch, Ops, T
from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights."""

    attention_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    q_norm: Weight
    k_norm: Weight
    o: Weight
    attended_norm: Weight
    mlp_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    transformed_norm: Weight
    attention: AttentionSpec
    rope: RopeSpec


_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "attended_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "transformed_norm": "post_feedforward_layernorm",
}


def _name(index: int, part: str) -> str:
    return f"model.layers.{index}.{_NAMES[part]}.weight"


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor by canonical name, in the order of use."""
    width, hidden, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    parts: dict[str, Shape] = {
        "attention_norm": (width,),
        "q": (queries, width),
        "k": (keys, width),
        "v": (keys, width),
        "q_norm": (head,),
        "k_norm": (head,),
        "o": (width, queries),
        "attended_norm": (width,),
        "mlp_norm": (width,),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
        "transformed_norm": (width,),
    }
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_size, width)}
    for index in range(config.num_layers):
        tensors |= {_name(index, part): shape for part, shape in parts.items()}
    tensors[FINAL_NORM] = (width,)
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, width)
    return tensors


class Gemma3Model:
    """Architecture "gemma3"; implements `Model`."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        """Raises CheckpointError, naming a tensor that is missing, superfluous or misshaped."""
        expected = expected_tensors(config)
        self._weights = consume(expected, {HEAD: expected[EMBEDDING]}, weights)
        tied = HEAD not in self._weights
        self._config = replace(config, tie_word_embeddings=tied)
        self._head = self._weights[EMBEDDING if tied else HEAD]
        self._layers = [
            _Layer(
                **{part: self._weights[_name(index, part)] for part in _NAMES},
                attention=attention_spec(config, index),
                rope=config.layer_rope(index),
            )
            for index in range(config.num_layers)
        ]

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def weights(self) -> Mapping[str, Weight]:
        return self._weights

    def forward(self, ops: Ops[T], batch: Batch[T]) -> T:
        """Logits [R, vocab] of the rows the step wants."""
        config = self._config
        x = ops.embed(batch.tokens, self._weights[EMBEDDING], config.hidden_size**0.5)
        for layer in self._layers:
            x = self._attend(ops, batch, x, layer)
            x = self._transform(ops, x, layer)
        x = ops.rms_norm(x, self._weights[FINAL_NORM], config.rms_norm_eps)
        return ops.logits(x, self._head)

    def _attend(self, ops: Ops[T], batch: Batch[T], x: T, layer: _Layer) -> T:
        heads, kv_heads, eps = layer.attention.heads, layer.attention.kv_heads, self._eps
        h = ops.rms_norm(x, layer.attention_norm, eps)
        q, k, v = (ops.linear(h, weight) for weight in (layer.q, layer.k, layer.v))
        q = ops.rms_norm(q, layer.q_norm, eps, heads)
        k = ops.rms_norm(k, layer.k_norm, eps, kv_heads)
        q = ops.rope(q, batch.positions, heads, layer.rope)
        k = ops.rope(k, batch.positions, kv_heads, layer.rope)
        attended = ops.linear(ops.attention(q, k, v, layer.attention), layer.o)
        return ops.add(x, ops.rms_norm(attended, layer.attended_norm, eps))

    def _transform(self, ops: Ops[T], x: T, layer: _Layer) -> T:
        h = ops.rms_norm(x, layer.mlp_norm, self._eps)
        gated = ops.gelu_mul(ops.linear(h, layer.gate), ops.linear(h, layer.up))
        down = ops.linear(gated, layer.down)
        return ops.add(x, ops.rms_norm(down, layer.transformed_norm, self._eps))

    @property
    def _eps(self) -> float:
        return self._config.rms_norm_eps
