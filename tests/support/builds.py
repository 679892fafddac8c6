"""Tiny checkpoints that the native kernels can run, and builds of them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from support.command_line import write_tiny_model
from support.tiny_files import TOKENS, tiny_folder

from trimaran.compute.native import BUILD_FILE
from trimaran.models.text_files import NAMES

HEADER_AT = 64


@dataclass(frozen=True)
class SoundBuild:
    """The bytes of a sound build's file, to be corrupted."""

    content: bytes = field(repr=False)


def write_native_model(folder: Path, **keys: Any) -> Path:
    """`write_tiny_model` with heads of a size that the kernels know."""
    heads = {
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 16,
    }
    return write_tiny_model(folder, **(heads | keys))


def read_header(content: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", content, 16)
    return json.loads(content[HEADER_AT : HEADER_AT + size])  # type: ignore[no-any-return]


def signed(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A build's file with its header changed by someone who makes all sums fit again."""
    header = read_header(content)
    (old,) = struct.unpack_from("<Q", content, 16)
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(HEADER_AT + len(text)) % 4096)
    data = content[HEADER_AT + old :]
    size = HEADER_AT + len(text) + len(data)
    prelude = content[:16] + struct.pack("<QQ", len(text), size)
    return prelude + hashlib.sha256(prelude + text).digest() + text + data


def load_build(folder: Path) -> Any:
    """A build with its weights, as a start reads it."""
    from trimaran.compute.native.artifact import Build

    return Build.open(folder, NAMES).load(threads=1)


def build_file(folder: Path) -> Path:
    return folder / BUILD_FILE


def write_native_folder(folder: Path) -> Path:
    """A Hugging Face folder of such a model, with a tokenizer and a chat template."""
    tiny_folder(folder, {"num_attention_heads": 2, "num_key_value_heads": 1})
    vocabulary = {text: number for number, text in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "<{{ messages[0].content }}>", "eos_token": "<|im_end|>"})
    )
    return folder
