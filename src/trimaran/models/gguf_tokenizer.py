"""Byte-level BPE from the metadata of a GGUF file, with llama.cpp's ids.

    text ──special tokens──▶ pieces ──pre-tokenizer──▶ words ──merges──▶ ids

The `tokenizers` package splits into words and merges; this module looks for the special
tokens itself, because llama.cpp looks for the longest ones first in the whole text, and
because what is special depends on the call.

Ids differ from llama.cpp's in two cases. Characters that came with Unicode 16 are letters,
digits and so on to `tokenizers` and unknown to llama.cpp. And llama.cpp takes some plain
tokens for special ones by their text, such as "</s>"; here the file's word counts.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section Tokenizer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import tokenizers
from tokenizers import models, pre_tokenizers

from trimaran.core.errors import CheckpointError, UnsupportedModelError, nearest
from trimaran.models import byte_level
from trimaran.models.seams import Seams
from trimaran.models.text_ids import text_ids
from trimaran.models.vocabulary import Vocabulary

log = logging.getLogger("trimaran")

_PREFIX = "tokenizer.ggml."

# Kinds of tokens, by GGUF's number.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words before merging, and what goes with it.

    Attributes:
        patterns: each cuts the words that the ones before it left: matches and what lies
            between them become words.
        whole_words: a word that is a token is that token, whatever the merges say.
        add_bos: where the file doesn't say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


# White space before a word loses its last character to that word.
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _line_aware(digits: str) -> str:
    """The pattern of Llama 3 and its descendants, who differ in how digits are grouped."""
    return (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


_DIGIT_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((_line_aware(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((_line_aware(r"\p{N}"),))
_UNNAMED = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _UNNAMED,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "codeshell": _DIGIT_BY_DIGIT,
    "command-r": _DIGIT_BY_DIGIT,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
}
"""By `tokenizer.ggml.pre`."""


def read_gguf_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """Builds the vocabulary from `tokenizer.ggml.*`.

    Raises:
        CheckpointError: a key is missing or unsound.
        UnsupportedModelError: not byte-level BPE, or an unknown pre-tokenizer.
    """
    keys = _Keys(metadata)
    _check_model(keys)
    pre = _pre_tokenizer(keys)
    tokens = keys.strings("tokens")
    kinds = keys.kinds(len(tokens))
    encoder = _Encoder(pre, tokens, kinds, keys.strings("merges"))
    bos, eos = keys.token("bos_token_id", len(tokens)), keys.token("eos_token_id", len(tokens))
    return Vocabulary(
        encoder=encoder,
        size=len(tokens),
        piece=_Pieces(tokens, kinds),
        special_ids=frozenset(i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)),
        bos_token_id=bos,
        eos_token_id=eos,
        prefix=_wanted(keys, "add_bos_token", pre.add_bos, "bos_token_id", bos),
        suffix=_wanted(keys, "add_eos_token", False, "eos_token_id", eos),
        seams=encoder.seams,
    )


class _Keys:
    """The tokenizer's part of the metadata, each value checked as it is read."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def value(self, key: str) -> object:
        return self._metadata.get(_PREFIX + key)

    def wrong(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{_PREFIX}{key} {what}; the file is not sound, fetch it again")

    def strings(self, key: str) -> list[str]:
        value = self.value(key)
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            raise self.wrong(key, "is missing" if value is None else "is not a list of texts")
        return value

    def kinds(self, count: int) -> list[int]:
        value = self.value("token_type")
        if value is None:
            return [_NORMAL] * count
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self.wrong("token_type", "is not a list of whole numbers")
        if len(value) != count:
            raise self.wrong("token_type", f"has {len(value)} values for {count} tokens")
        return value

    def token(self, key: str, count: int) -> int | None:
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self.wrong(key, f"is {value!r}, not a token id of 0 to {count - 1}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}, neither true nor false")
        return value


def _check_model(keys: _Keys) -> None:
    model = keys.value("model")
    if model is None:
        raise keys.wrong("model", "is missing")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"{_PREFIX}model is {model!r}, which is not supported; only 'gpt2' (byte-level BPE)"
            " is. The model's Hugging Face folder has a tokenizer.json, which may be"
        )


def _pre_tokenizer(keys: _Keys) -> PreTokenizer:
    name = keys.value("pre")
    if name is None or name == "":
        log.warning(
            "the file doesn't name its pre-tokenizer (%spre); 'default' is used, and answers may"
            " be worse than they could: convert the model anew",
            _PREFIX,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{_PREFIX}pre is {name!r}, which is not supported."
            f"{nearest(str(name), PRE_TOKENIZERS)} Supported are"
            f" {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[str(name)]


def _wanted(keys: _Keys, flag: str, default: bool, key: str, token: int | None) -> tuple[int, ...]:
    if not keys.flag(flag, default):
        return ()
    if token is None:
        raise keys.wrong(key, f"is missing, though {_PREFIX}{flag} wants it")
    return (token,)


class _Pieces:
    """The bytes of each token."""

    def __init__(self, tokens: Sequence[str], kinds: Sequence[int]) -> None:
        self._tokens = tokens
        self._kinds = kinds

    def __call__(self, token: int) -> bytes:
        text, kind = self._tokens[token], self._kinds[token]
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN):
            return text.encode()
        if kind == _UNUSED:
            return b""
        if kind == _BYTE and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)):
            return bytes.fromhex(match[1])
        return byte_level.to_bytes(text)


class _Encoder:
    """Text to ids. Implements `TextEncoder`."""

    def __init__(
        self,
        pre: PreTokenizer,
        tokens: Sequence[str],
        kinds: Sequence[int],
        merges: Sequence[str],
    ) -> None:
        self._bpe = _Merger(pre, tokens, merges)
        special = [
            (tokens[i], i)
            for i, kind in enumerate(kinds)
            if kind != _NORMAL and kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and tokens[i]
        ]
        special.sort(key=lambda item: len(item[0].encode()), reverse=True)
        self._special = _SpecialTokens(special)
        self._user_defined = _SpecialTokens(
            [(text, i) for text, i in special if kinds[i] == _USER_DEFINED]
        )

    def seams(self) -> Seams:
        """All of `PRE_TOKENIZERS` keep to both rules of `models/seams.py`."""
        return Seams(self._special.texts, after_letters=True, halves=True)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        special = self._special if parse_special else self._user_defined
        for piece in special.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += self._bpe.encode(piece)
        return ids


class _SpecialTokens:
    """Tokens that are found in a text before anything else, longest first."""

    def __init__(self, tokens: Sequence[tuple[str, int]]) -> None:
        self._tokens = tokens
        self._any = re.compile("|".join(re.escape(text) for text, _ in tokens) or "(?!)")

    @property
    def texts(self) -> list[str]:
        return [text for text, _ in self._tokens]

    def split(self, text: str) -> Iterable[str | int]:
        """The text in pieces, with the ids of the tokens found between them."""
        if not self._any.search(text):
            return (text,)
        pieces: list[str | int] = [text]
        for token, number in self._tokens:
            if token in text:
                pieces = [part for piece in pieces for part in _cut(piece, token, number)]
        return pieces


def _cut(piece: str | int, token: str, number: int) -> Iterator[str | int]:
    if isinstance(piece, int):
        yield piece
        return
    first, *rest = piece.split(token)
    yield first
    for part in rest:
        yield number
        yield part


class _Merger:
    """Words and merges: a `tokenizers.Tokenizer` that knows of no special tokens.

    What llama.cpp can do and `tokenizers` can't is done with ids beyond the vocabulary's,
    which are replaced afterwards: a byte that the vocabulary lacks is left out, yet parts
    its neighbours; a merge whose result isn't a token yields the tokens of its bytes (of
    which llama.cpp loses those that don't print).
    """

    def __init__(self, pre: PreTokenizer, tokens: Sequence[str], merges: Sequence[str]) -> None:
        vocabulary = {text: number for number, text in enumerate(tokens)}
        self._size = len(tokens)
        self._instead: dict[int, list[int]] = {}
        for character in byte_level.CHARACTERS:
            if character not in vocabulary:
                self._replace(vocabulary, character, [])
        pairs = [tuple(merge.split(" ", 1)) for merge in dict.fromkeys(merges)]
        try:
            bpe = _bpe(vocabulary, pairs, pre)
        except Exception:
            self._add_missing_results(vocabulary, pairs)
            bpe = _bpe(vocabulary, pairs, pre)
        cuts = [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
        ]
        self._tokenizer = tokenizers.Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def _replace(self, vocabulary: dict[str, int], text: str, ids: list[int]) -> None:
        number = self._size + len(self._instead)
        vocabulary[text] = number
        self._instead[number] = ids

    def _add_missing_results(
        self, vocabulary: dict[str, int], pairs: Iterable[tuple[str, ...]]
    ) -> None:
        for pair in pairs:
            if len(pair) != 2 or not all(pair):
                raise CheckpointError(
                    f"{_PREFIX}merges has {' '.join(pair)!r}, which is not two texts with a space"
                    " between them; the file is not sound, fetch it again"
                )
            for text in (*pair, "".join(pair)):
                if text not in vocabulary:
                    characters = [vocabulary.get(character, self._size) for character in text]
                    ids = [number for number in characters if number < self._size]
                    self._replace(vocabulary, text, ids)

    def encode(self, text: str) -> list[int]:
        ids = text_ids(self._tokenizer, text)
        if not self._instead:
            return ids
        size, instead = self._size, self._instead
        if max(ids, default=0) < size:
            return ids
        return [n for number in ids for n in (instead[number] if number >= size else (number,))]


def _bpe(vocabulary: dict[str, int], pairs: list[tuple[str, ...]], pre: PreTokenizer) -> models.BPE:
    """
    Raises:
        Exception: a pair isn't one, or it or its result isn't in the vocabulary.
    """
    return models.BPE(vocabulary, cast(list[tuple[str, str]], pairs), ignore_merges=pre.whole_words)
