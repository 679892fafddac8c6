"""A model small enough for the reference back end to run hundreds of steps a second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.compute.backend import Backend
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.clock import VirtualClock
from trimaran.core.config import EngineConfig
from trimaran.engine.core import EngineCore
from trimaran.engine.tiers import make_cache
from trimaran.models.config import ModelConfig
from trimaran.models.llama import LlamaModel, expected_tensors
from trimaran.models.model import Model
from trimaran.models.rope import RopeSpec
from trimaran.models.tokenizer import Tokenizer
from trimaran.models.weight import Weight
from trimaran.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class ArrayStorage:
    """A tensor that lives in memory."""

    array: npt.NDArray[np.float32]
    type_name: str = "F32"

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.array.reshape(self.array.shape[0], -1).view(np.uint8)

    def dequantize(self) -> npt.NDArray[np.float32]:
        return self.array


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "context_length": 256,
        "rms_norm_eps": 1e-5,
        "rope": RopeSpec(dim=16, theta=10000.0),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_ids": (257,),
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def tiny_model(seed: int = 0, **changes: object) -> Model:
    """Random weights, scaled so that its greedy text doesn't settle on one token."""
    config = tiny_config(**changes)
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        values = rng.normal(size=shape).astype(np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name != "model.embed_tokens.weight":
            values *= 2.0 / np.sqrt(shape[-1])
        weights[name] = Weight(name, shape, ArrayStorage(values))
    return LlamaModel(config, weights)


def tiny_tokenizer() -> Tokenizer:
    """Bytes as tokens 0..255 in the byte-level order, then four control tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(256 + extra)
            extra += 1
    specials = ["<|start|>", "<|end|>", "<|a|>", "<|b|>"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet.values(), *specials],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 257,
        }
    )


def make_core(
    backend: Backend | None = None,
    *,
    blocks: int = 64,
    seed: int = 0,
    model: Model | None = None,
    tokenizer: Tokenizer | None = None,
    **options: object,
) -> EngineCore:
    """An engine over the tiny model, or another, with a cache of `blocks` blocks."""
    model = model or tiny_model(seed)
    config = EngineConfig.from_mapping({"block_size": 8, "backend": "reference"} | options)
    backend = backend or ReferenceBackend(model)
    backend.allocate_cache(blocks, config.block_size)
    clock = VirtualClock()
    kv = make_cache(config, blocks)
    length = min(model.config.context_length, blocks * config.block_size)
    return EngineCore(
        model.config,
        tokenizer or tiny_tokenizer(),
        backend,
        Scheduler(config, kv, clock),
        config,
        config.max_model_len or length,
        clock,
    )
