"""The decoder that Llama and its relatives share, with what they differ in as parameters.

x = embed(tokens)
each layer:   h = rms_norm(x)
              q, k, v = linear(h)           with or without biases
              x += o(attention(rope(q), rope(k), v))
              h = rms_norm(x)
              x += down(silu(gate(h)) * up(h))
logits = head(rms_norm(x))                  the head is the embedding where they are tied
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from trimaran.models.config import ModelConfig
from trimaran.models.inventory import Shape, consume
from trimaran.models.ops import AttentionSpec, Batch, Ops, T
from trimaran.models.weight import Weight

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights."""

    attention_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_bias: Weight | None
    k_bias: Weight | None
    v_bias: Weight | None
    o_bias: Weight | None
    mlp_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    attention: AttentionSpec


def decoder_tensors(config: ModelConfig, biased: Collection[str]) -> dict[str, Shape]:
    """Every tensor of the decoder and its shape, in the order of use.

    Args:
        biased: which of "q", "k", "v" and "o" have a bias.
    """
    width, hidden = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q": (queries, width), "k": (keys, width), "v": (keys, width)}
    attention["o"] = (width, queries)
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_size, width)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        tensors[layer + "input_layernorm.weight"] = (width,)
        for part, shape in attention.items():
            tensors[f"{layer}self_attn.{part}_proj.weight"] = shape
            if part in biased:
                tensors[f"{layer}self_attn.{part}_proj.bias"] = shape[:1]
        tensors[layer + "post_attention_layernorm.weight"] = (width,)
        tensors[layer + "mlp.gate_proj.weight"] = (hidden, width)
        tensors[layer + "mlp.up_proj.weight"] = (hidden, width)
        tensors[layer + "mlp.down_proj.weight"] = (width, hidden)
    tensors[FINAL_NORM] = (width,)
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, width)
    return tensors


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """The attention of a layer."""
    return AttentionSpec(
        layer=layer,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale(),
        window=config.window(layer),
    )


class Decoder:
    """A decoder-only transformer; implements `Model`."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Weight], biased: Collection[str]
    ) -> None:
        """Checks that `weights` are the decoder's tensors, all of them and no other.

        A head of its own is used even where the configuration ties it to the embedding, as
        transformers 5 does.

        Raises:
            CheckpointError: names the tensor that is missing, superfluous or of another shape.
        """
        expected = decoder_tensors(config, biased)
        self._weights = consume(expected, {HEAD: expected[EMBEDDING]}, weights)
        tied = HEAD not in self._weights
        self._config = replace(config, tie_word_embeddings=tied)
        self._head = self._weights[EMBEDDING if tied else HEAD]
        self._layers = [self._layer(index) for index in range(config.num_layers)]

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def weights(self) -> Mapping[str, Weight]:
        return self._weights

    def forward(self, ops: Ops[T], batch: Batch[T]) -> T:
        """Logits [R, vocab] of the rows the step wants."""
        x = ops.embed(batch.tokens, self._weights[EMBEDDING])
        for layer in self._layers:
            x = self._attend(ops, batch, x, layer)
            x = self._transform(ops, x, layer)
        x = ops.rms_norm(x, self._weights[FINAL_NORM], self._config.rms_norm_eps)
        return ops.logits(x, self._head)

    def _attend(self, ops: Ops[T], batch: Batch[T], x: T, layer: _Layer) -> T:
        config = self._config
        h = ops.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        q = ops.linear(h, layer.q, layer.q_bias)
        k = ops.linear(h, layer.k, layer.k_bias)
        v = ops.linear(h, layer.v, layer.v_bias)
        rope = config.layer_rope(layer.attention.layer)
        q = ops.rope(q, batch.positions, config.num_heads, rope)
        k = ops.rope(k, batch.positions, config.num_kv_heads, rope)
        attended = ops.attention(q, k, v, layer.attention)
        return ops.add(x, ops.linear(attended, layer.o, layer.o_bias))

    def _transform(self, ops: Ops[T], x: T, layer: _Layer) -> T:
        h = ops.rms_norm(x, layer.mlp_norm, self._config.rms_norm_eps)
        gated = ops.silu_mul(ops.linear(h, layer.gate), ops.linear(h, layer.up))
        return ops.add(x, ops.linear(gated, layer.down))

    def _layer(self, index: int) -> _Layer:
        config, weights, prefix = self._config, self._weights, f"model.layers.{index}."
        attention = prefix + "self_attn."
        return _Layer(
            attention_norm=weights[prefix + "input_layernorm.weight"],
            q=weights[attention + "q_proj.weight"],
            k=weights[attention + "k_proj.weight"],
            v=weights[attention + "v_proj.weight"],
            o=weights[attention + "o_proj.weight"],
            q_bias=weights.get(attention + "q_proj.bias"),
            k_bias=weights.get(attention + "k_proj.bias"),
            v_bias=weights.get(attention + "v_proj.bias"),
            o_bias=weights.get(attention + "o_proj.bias"),
            mlp_norm=weights[prefix + "post_attention_layernorm.weight"],
            gate=weights[prefix + "mlp.gate_proj.weight"],
            up=weights[prefix + "mlp.up_proj.weight"],
            down=weights[prefix + "mlp.down_proj.weight"],
            attention=attention_spec(config, index),
        )
