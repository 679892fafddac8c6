"""A vocabulary whose ids show where a pre-tokenizer cuts: pairs of bytes are tokens.

Within a word bytes merge two by two, across the border of two words they don't; so two
tokenizers that give equal ids on many texts cut them alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny_files import WIDTH, gguf_keys, gguf_tensors, tiny_tensors, write_gguf

SPECIAL = {"<|begin|>": 3, "<|end|>": 3, "<|end": 3, "<tool>": 4, "<tool><|begin|>": 4, "<unk>": 2}
"""Texts and kinds of the tokens that aren't bytes: 2 unknown, 3 control, 4 user-defined."""


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(0x100 + hidden.index(b)) for b in range(256)]


def pair_keys(pre: str, paired: Iterable[int] = range(256), **changed: Any) -> dict[str, Any]:
    """Metadata of a tiny model with such a vocabulary.

    Args:
        paired: the bytes of which all pairs are tokens.
        changed: keys of the tokenizer; `missing` names tokens that the vocabulary lacks,
            though merges make them.
    """
    characters = byte_characters()
    chosen = [characters[byte] for byte in sorted(set(paired))]
    pairs = [(a, b) for a in chosen for b in chosen]
    missing = set(changed.pop("missing", ()))
    plain = [text for text in (*characters, *(a + b for a, b in pairs)) if text not in missing]
    tokens = [*plain, *SPECIAL]
    own = {
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * len(plain) + list(SPECIAL.values()),
        "merges": [f"{a} {b}" for a, b in pairs],
        "bos_token_id": tokens.index("<|begin|>"),
        "eos_token_id": tokens.index("<|end|>"),
        **changed,
    }
    keys = gguf_keys() | {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    return keys | {"llama.vocab_size": len(own["tokens"])}


def write_pair_gguf(path: Path, keys: dict[str, Any]) -> Path:
    """A file with these keys that llama.cpp loads."""
    tensors = gguf_tensors(tiny_tensors(tied=True))
    tensors["token_embd.weight"] = np.zeros((keys["llama.vocab_size"], WIDTH), np.float32)
    return write_gguf(path, keys, tensors)
