"""Tokenizers of Hugging Face folders of each kind, small and made to show where they cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tokenizers
from support.pair_vocabulary import byte_characters
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

SPACES = r"|\s+(?!\S)|\s+"
LINES = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{SPACES}"
ENDS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{ENDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+{SPACES}"
LLAMA3 = rf"(?i:{ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{LINES}"
QWEN2 = rf"(?i:{ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{LINES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:{ENDS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:{ENDS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+{SPACES}"
)

SPECIAL = (
    AddedToken("<|begin|>", special=True),
    AddedToken("<|end|>", special=True),
    AddedToken("<|end", special=True),
    AddedToken("<two words>", special=True, normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<K;>", normalized=True),
    AddedToken("<K d>", normalized=True),
)


def pair_model() -> models.BPE:
    """Byte-level; all pairs of bytes are tokens, so ids show where words end."""
    characters = byte_characters()
    pairs = [(a, b) for a in characters for b in characters]
    tokens = [*characters, *(a + b for a, b in pairs)]
    return models.BPE({token: i for i, token in enumerate(tokens)}, pairs)


def byte_level(
    *patterns: str, nfc: bool = False, use_regex: bool = False, prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Byte-level BPE over words cut by the patterns."""
    tokenizer = tokenizers.Tokenizer(pair_model())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=use_regex)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(SPECIAL))
    return tokenizer


def sentence_piece(metaspace: bool, inside: bool = False) -> tokenizers.Tokenizer:
    """As Llama 2's (a sign is put in front), or with its newer pre-tokenizer.

    Args:
        inside: has a token with the sign for a space inside of it, which no word keeps to.
    """
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + ["▁"]
    pairs = [(a, b) for a in letters for b in letters if inside or b != "▁" or a == "▁"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += [a + b for a, b in pairs]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            pairs,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken("<|begin|>", special=True, normalized=False),
            AddedToken("<two words>", special=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
        ]
    )
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "gpt-2 in front a space": lambda: byte_level(use_regex=True, prefix_space=True),
    "digits": lambda: byte_level(r"\p{N}", use_regex=True),
    "llama-3": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2, nfc=True),
    "gpt-4o": lambda: byte_level(GPT4O),
    "sentencepiece": lambda: sentence_piece(metaspace=False),
    "metaspace": lambda: sentence_piece(metaspace=True),
}
"""Kinds whose seams are known."""

UNKNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "another pattern": lambda: byte_level(r"\S+\s*"),
    "digits alone": lambda: byte_level(r"\p{N}"),
    "a space inside of tokens": lambda: sentence_piece(metaspace=False, inside=True),
}
"""Kinds that look across what is a seam elsewhere, or may."""


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    """A folder with that tokenizer alone."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
