"""Whether a tokenizer.json keeps to the rules of `models/seams.py`, and to which.

Only parts are taken for which the rules were shown; with any other one, a growing text is
held back until it has ended.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import tokenizers

from trimaran.models.seams import Seams

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPACES = r"|\s+(?!\S)|\s+"
_LINES = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_SPACES}"
_ENDS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Patterns as they stand in tokenizer.json -> whether rule B holds, too.
_PATTERNS = {
    rf"{_ENDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+{_SPACES}": True,  # GPT-2
    rf"(?i:{_ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_LINES}": True,  # Llama 3
    rf"(?i:{_ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_LINES}": True,  # Qwen2
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_ENDS})?"  # GPT-4o
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_ENDS})?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+{_SPACES}": False,
    r"\p{N}": True,
    r"\p{N}{1,3}": True,
    r"\p{N}+": True,
}


def find_seams(tokenizer: tokenizers.Tokenizer) -> Seams | None:
    """The seams of a tokenizer, or None where a part of it isn't known."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.single_word for token in added):
        return None
    normalizers = list(_steps(tokenizer.normalizer, "normalizers"))
    kinds = {step["type"] for step in normalizers}
    texts = [token.content for token in added]
    swallowing = [token.content for token in added if token.rstrip]
    pre = list(_steps(tokenizer.pre_tokenizer, "pretokenizers"))
    if kinds <= {"NFC"} and any(step["type"] == "ByteLevel" for step in pre):
        rules = [_rule_b(step) for step in pre]
        if None in rules or not any(_cuts(step) for step in pre):
            return None
        return Seams(
            texts,
            after_letters=all(rules),
            halves=not any(step.get("add_prefix_space") for step in pre),
            swallowing=swallowing,
            normal=_nfc if kinds else None,
        )
    if _is_sentence_piece(tokenizer, normalizers, pre) and not any(t.normalized for t in added):
        return Seams(texts, after_letters=False, halves=False, tabs=False, swallowing=swallowing)
    return None


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _rule_b(step: dict[str, Any]) -> bool | None:
    """Whether a step that keeps to rule A keeps to rule B; None: it isn't known."""
    kind = step["type"]
    if kind in ("ByteLevel", "Digits"):
        return True
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step.get("pattern")
        return _PATTERNS.get(str(pattern.get("Regex"))) if isinstance(pattern, dict) else None
    return None


def _cuts(step: dict[str, Any]) -> bool:
    """Whether a step cuts a text between words, and not only around digits."""
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step["type"] == "Split" and not step["pattern"]["Regex"].startswith(r"\p{N}")


def _is_sentence_piece(
    tokenizer: tokenizers.Tokenizer, normalizers: list[dict[str, Any]], pre: list[dict[str, Any]]
) -> bool:
    """Whether spaces become a sign that begins tokens and is never inside of one."""
    if not isinstance(tokenizer.model, tokenizers.models.BPE):
        return False
    if any(step["type"] != "Metaspace" or step.get("replacement") != _SPACE for step in pre):
        return False
    replaced = bool(pre)
    for step in normalizers:
        if step["type"] == "Replace":
            if step.get("pattern") != {"String": " "} or step.get("content") != _SPACE:
                return False
            replaced = True
        elif step["type"] != "Prepend" or step.get("prepend") != _SPACE:
            return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    inside = re.compile(f"[^{_SPACE}]{_SPACE}")
    return replaced and _SPACE in vocabulary and not any(map(inside.search, vocabulary))


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """A normaliser's or pre-tokenizer's steps as tokenizer.json describes them."""
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step[name], *waiting]
        else:
            yield step
