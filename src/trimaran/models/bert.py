"""BERT, the encoder (Devlin et al. 2018, https://arxiv.org/abs/1810.04805).

x = norm(word[tokens] + position[0, 1, …] + type[0])
each layer:   x = norm(x + o(attention(q(x), k(x), v(x))))     every token sees every token
              x = norm(x + down(gelu(up(x))))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimaran.models.encoder_ops import EncoderOps, T
from trimaran.models.inventory import Shape, consume
from trimaran.models.weight import Weight

WORDS = "embeddings.word_embeddings"
POSITIONS = "embeddings.position_embeddings"
TYPES = "embeddings.token_type_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Dimensions and constants of an encoder, and how its vectors are made.

    Attributes:
        context_length: tokens of a text at most, those around it included.
        num_positions: rows of the table of positions; `context_length` at least.
        num_types: rows of the table of segments, of which texts of one segment use the first.
        pooling: the vector of a text: the mean of its tokens' vectors, or that of the first.
        normalize: vectors have length 1.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_types: int
    context_length: int
    layer_norm_eps: float
    pooling: Literal["mean", "cls"]
    normalize: bool


def bert_tensors(config: EncoderConfig) -> dict[str, Shape]:
    """Every tensor and its shape, in the order of use."""
    width, hidden = config.hidden_size, config.intermediate_size
    tensors: dict[str, Shape] = {
        f"{WORDS}.weight": (config.vocab_size, width),
        f"{POSITIONS}.weight": (config.num_positions, width),
        f"{TYPES}.weight": (config.num_types, width),
    }

    def add(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = shape
        tensors[f"{name}.bias"] = shape[:1]

    add("embeddings.LayerNorm", width)
    for index in range(config.num_layers):
        layer = f"encoder.layer.{index}."
        for part in ("query", "key", "value"):
            add(f"{layer}attention.self.{part}", width, width)
        add(f"{layer}attention.output.dense", width, width)
        add(f"{layer}attention.output.LayerNorm", width)
        add(f"{layer}intermediate.dense", hidden, width)
        add(f"{layer}output.dense", width, hidden)
        add(f"{layer}output.LayerNorm", width)
    return tensors


class BertModel:
    """Architecture "bert"."""

    def __init__(self, config: EncoderConfig, weights: Mapping[str, Weight]) -> None:
        """Checks that `weights` are the model's tensors, all of them and no other; a pooler,
        which sentence vectors don't use, may be there.

        Raises:
            CheckpointError: names the tensor that is missing, superfluous or of another shape.
        """
        width = config.hidden_size
        pooler = {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
        expected = bert_tensors(config)
        found = consume(expected, pooler, weights)
        self.config = config
        self.weights: Mapping[str, Weight] = {name: found[name] for name in expected}

    def forward(self, ops: EncoderOps[T], tokens: T, positions: T, types: T) -> T:
        """The last layer's vectors, [tokens, width], of one sequence.

        Args:
            tokens: [tokens] ids.
            positions: [tokens] 0, 1, 2, …
            types: [tokens] the segment of each, all 0 for texts of one segment.
        """
        x = ops.embed(tokens, self.weights[f"{WORDS}.weight"])
        x = ops.add(x, ops.embed(types, self.weights[f"{TYPES}.weight"]))
        x = ops.add(x, ops.embed(positions, self.weights[f"{POSITIONS}.weight"]))
        x = self._norm(ops, x, "embeddings.LayerNorm")
        for index in range(self.config.num_layers):
            layer = f"encoder.layer.{index}."
            x = self._attend(ops, x, f"{layer}attention.")
            h = ops.gelu(self._linear(ops, x, f"{layer}intermediate.dense"))
            h = ops.add(self._linear(ops, h, f"{layer}output.dense"), x)
            x = self._norm(ops, h, f"{layer}output.LayerNorm")
        return x

    def _attend(self, ops: EncoderOps[T], x: T, prefix: str) -> T:
        q, k, v = (self._linear(ops, x, f"{prefix}self.{p}") for p in ("query", "key", "value"))
        h = ops.attention(q, k, v, self.config.num_heads)
        h = ops.add(self._linear(ops, h, f"{prefix}output.dense"), x)
        return self._norm(ops, h, f"{prefix}output.LayerNorm")

    def _linear(self, ops: EncoderOps[T], x: T, name: str) -> T:
        return ops.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, ops: EncoderOps[T], x: T, name: str) -> T:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return ops.layer_norm(x, weight, bias, self.config.layer_norm_eps)
