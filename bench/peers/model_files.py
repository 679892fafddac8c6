"""One model's weights in the file format that each engine reads.

Everything starts from one GGUF file. What is made from it lies in the cache and is made
once; a file that appears there is whole.

    <cache>/peers/models/<name>/
    ├── Q4_0.gguf          of random weights: the start itself; else requantised
    ├── bf16/              Hugging Face folder, dequantised and rounded to bf16
    ├── bf16-served/       the same (by links) with the file's tokenizer, for a server
    └── openvino-int8/     IR with weights in 8 bits, a scale per output channel
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

from trimaran.models.config import ModelConfig
from trimaran.models.load import load_checkpoint
from trimaran.models.store import DEFAULT_MODEL, cache_folder, resolve

ROOT = Path(__file__).resolve().parent.parent.parent
RANDOM_LLAMA = "random-llama-1b"

# The shape of Llama-3.2-1B.
_LLAMA = {"width": 2048, "hidden": 8192, "layers": 16, "heads": 32, "kv_heads": 8}
_LLAMA_VOCAB = 128_256
_LLAMA_CONTEXT = 8192
_HEAD_DIM = 64
_CONTROL, _UNUSED = 3, 5  # tokenizer.ggml.token_type


def peers_folder() -> Path:
    """Environments of the peers and models in their formats."""
    return cache_folder() / "peers"


def source(model: str) -> Path:
    """The GGUF file everything else is made from; `model` is a name, a path or RANDOM_LLAMA."""
    if model == RANDOM_LLAMA:
        return _made(RANDOM_LLAMA, "Q4_0.gguf", _write_random_llama)
    return Path(resolve(model))


def q4_0(model: str) -> Path:
    """The model requantised to Q4_0, llama.cpp's fastest type."""
    path = source(model)
    if model == RANDOM_LLAMA:
        return path
    kind, write = gguf.GGMLQuantizationType.Q4_0, _of_tests("oracle.float_gguf").write_float_gguf
    return _made(path.stem, "Q4_0.gguf", lambda target: write(path, target, kind))


def bf16_folder(model: str) -> Path:
    """The dequantised weights, rounded to bf16, as a Hugging Face folder."""
    path = source(model)
    return _made(_name(path), "bf16", lambda target: _write_folder(path, target))


def served_folder(model: str) -> Path:
    """The bf16 folder with a tokenizer, without which a server can't make text."""
    path, weights = source(model), bf16_folder(model)

    def write(folder: Path) -> None:
        folder.mkdir()
        for file in weights.iterdir():
            (folder / file.name).symlink_to(file)
        _write_tokenizer(path, folder)

    return _made(_name(path), "bf16-served", write)


def openvino_int8(model: str, python: Path) -> Path:
    """The weights in OpenVINO's 8 bits, exported from the bf16 folder.

    Args:
        python: of an environment with optimum-intel.

    Raises:
        subprocess.CalledProcessError: the export failed; its message is on stderr.
    """
    folder = bf16_folder(model)

    def export(target: Path) -> None:
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model"]
        command += [str(folder), "--task", "text-generation-with-past"]
        command += ["--weight-format", "int8", str(target)]
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, stdout=sys.stderr, env=offline)

    return _made(folder.parent.name, "openvino-int8", export)


def _of_tests(module: str) -> Any:
    """A module of the tests, which write files of models too."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module(module)


def _name(path: Path) -> str:
    return path.parent.name if path.parent.parent == peers_folder() / "models" else path.stem


def _made(name: str, file: str, make: Callable[[Path], None]) -> Path:
    """`file` in the model's folder, made under another name first where it is missing."""
    target = peers_folder() / "models" / name / file
    if target.exists():
        return target
    print(f"making {target}", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent)) / file
    try:
        make(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished.parent)
    return target


# ---------------------------------------------------------------------- Hugging Face folder


def _write_folder(path: Path, folder: Path) -> None:
    model = load_checkpoint(path).model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_hf_config(model.config), indent=2))
    weights = {weight.name: weight for weight in model.weights.values()}
    shapes = {name: weight.shape for name, weight in weights.items()}
    _of_tests("support.safetensors_file").write_safetensors(
        folder / "model.safetensors", shapes, lambda name: weights[name].values(), "BF16"
    )


def _write_tokenizer(path: Path, folder: Path) -> None:
    """tokenizer.json of the byte-level BPE of a GGUF file: its tokens, merges and control tokens.

    Words are cut as GPT-2 cuts them, whatever the file says, so the ids of a text may be others
    than the model's own. The texts of ids are right, and the bench sends ids.
    """
    fields = gguf.GGUFReader(path).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    if value("model") != "gpt2":
        raise SystemExit(f"{path} has a tokenizer of kind {value('model')}, not byte-level BPE")
    tokens: list[str] = value("tokens")
    pairs = [tuple(merge.split(" ", 1)) for merge in value("merges")]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: i for i, text in enumerate(tokens)}, pairs)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    kinds = value("token_type")
    made.add_special_tokens([text for text, k in zip(tokens, kinds, strict=True) if k == _CONTROL])
    made.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[value("eos_token_id")],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    return {
        "architectures": [names[config.architecture]],
        "model_type": config.architecture,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


# ---------------------------------------------------------------------- random weights


def _write_random_llama(target: Path) -> None:
    """A Llama-3.2-1B of random weights in Q4_0, with the default model's tokenizer.

    The vocabulary is filled up with tokens that no text has, to Llama's size.
    """
    template = gguf.GGUFReader(resolve(DEFAULT_MODEL))
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(RANDOM_LLAMA)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    writer.add_context_length(_LLAMA_CONTEXT)
    writer.add_embedding_length(_LLAMA["width"])
    writer.add_feed_forward_length(_LLAMA["hidden"])
    writer.add_block_count(_LLAMA["layers"])
    writer.add_head_count(_LLAMA["heads"])
    writer.add_head_count_kv(_LLAMA["kv_heads"])
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_LLAMA_VOCAB)
    _add_tokenizer(writer, template)
    draw = np.random.default_rng(0)
    for name, shape in _llama_shapes().items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        kind = gguf.GGMLQuantizationType.Q4_0
        values = draw.standard_normal(shape, np.float32) * np.float32(0.02)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, template: gguf.GGUFReader) -> None:
    for field in template.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            value = value + [f"<|unused_{i}|>" for i in range(len(value), _LLAMA_VOCAB)]
        if field.name == "tokenizer.ggml.token_type":
            value = value + [_UNUSED] * (_LLAMA_VOCAB - len(value))
        element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=element)


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    width, hidden = _LLAMA["width"], _LLAMA["hidden"]
    keys = _LLAMA["kv_heads"] * _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (_LLAMA_VOCAB, width)}
    for layer in range(_LLAMA["layers"]):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (width,),
            f"blk.{layer}.attn_q.weight": (width, width),
            f"blk.{layer}.attn_k.weight": (keys, width),
            f"blk.{layer}.attn_v.weight": (keys, width),
            f"blk.{layer}.attn_output.weight": (width, width),
            f"blk.{layer}.ffn_norm.weight": (width,),
            f"blk.{layer}.ffn_gate.weight": (hidden, width),
            f"blk.{layer}.ffn_up.weight": (hidden, width),
            f"blk.{layer}.ffn_down.weight": (width, hidden),
        }
    return shapes | {"output_norm.weight": (width,)}
