"""The tokenizer of a Hugging Face folder, run by the `tokenizers` package.

tokenizer.json says how text becomes ids. What it leaves open are the bytes of one token,
which depend on its kind of decoder, and which tokens a model wants around a prompt, where
tokenizer_config.json has a say too.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import tokenizers

from trimaran.core.errors import CheckpointError, UnsupportedModelError
from trimaran.models import byte_level
from trimaran.models.folder_seams import find_seams
from trimaran.models.text_ids import text_ids
from trimaran.models.tokenizer_config import TokenizerConfig
from trimaran.models.vocabulary import Vocabulary

FILE_NAME = "tokenizer.json"

MAX_BYTES = 256 << 20
"""Real ones have up to some thirty million."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def read_folder_vocabulary(folder: Path) -> Vocabulary:
    """Reads tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Raises:
        CheckpointError: a file is missing or unsound.
        UnsupportedModelError: a decoder by which the bytes of one token can't be told.
    """
    tokenizer = _load(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = TokenizerConfig.read(folder)
    decoder = _Decoder.of(tokenizer, folder)
    bos, eos = (_id(tokenizer, config, key) for key in ("bos_token", "eos_token"))
    prefix, suffix = _surroundings(tokenizer)
    return Vocabulary(
        encoder=_Encoder(tokenizer),
        size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        piece=_Pieces(tokenizer, decoder),
        special_ids=frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        ),
        bos_token_id=bos,
        eos_token_id=eos,
        prefix=_with(prefix, bos, config.flag("add_bos_token"), front=True),
        suffix=_with(suffix, eos, config.flag("add_eos_token"), front=False),
        strips_space=decoder.strips_space,
        seams=partial(find_seams, tokenizer),
    )


def _load(folder: Path) -> tokenizers.Tokenizer:
    path = folder / FILE_NAME
    if not path.exists():
        other = next((p.name for p in folder.glob("*") if p.suffix in (".model", ".tiktoken")), "")
        hint = f"; it has {other}, from which `transformers` can make one" if other else ""
        raise CheckpointError(f"{folder} has no {FILE_NAME}{hint}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(
                f"{path} has more than {MAX_BYTES} bytes, too many for such a file"
            )
        return tokenizers.Tokenizer.from_file(str(path))
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` raises nothing more precise
        raise CheckpointError(f"{path} is not a sound tokenizer: {error}") from None


def _id(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig, key: str) -> int | None:
    text = config.token(key)
    if text is None:
        return None
    number = tokenizer.token_to_id(text)
    if number is None:
        raise CheckpointError(
            f"{config.folder}: {key} is {text!r}, which {FILE_NAME} doesn't know as a token"
        )
    return number


def _surroundings(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    ids, marks = encoding.ids, encoding.special_tokens_mask
    own = [place for place, mark in enumerate(marks) if not mark]
    if not own:
        return tuple(ids), ()
    return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])


def _with(
    around: tuple[int, ...], token: int | None, wanted: bool | None, *, front: bool
) -> tuple[int, ...]:
    """The tokens around a text once tokenizer_config.json has had its say."""
    if wanted is None or token is None or wanted == (token in around):
        return around
    if not wanted:
        return tuple(number for number in around if number != token)
    return (token, *around) if front else (*around, token)


class _Encoder:
    """Text to ids. Implements `TextEncoder`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._literal()
        return text_ids(tokenizer, text)

    def _literal(self) -> tokenizers.Tokenizer:
        with self._lock:
            return self._copy

    @functools.cached_property
    def _copy(self) -> tokenizers.Tokenizer:
        """The same, but special tokens in a text are text; made when first needed."""
        literal = copy.deepcopy(self._tokenizer)
        literal.encode_special_tokens = True
        return literal


class _Pieces:
    """The bytes of each token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: _Decoder) -> None:
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._added = {
            number: token.content.encode()
            for number, token in tokenizer.get_added_tokens_decoder().items()
        }

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        text = self._tokenizer.id_to_token(token)
        return b"" if text is None else self._decoder.to_bytes(text)


class _Decoder:
    """What the decoder in tokenizer.json does to one token.

    Known are the families of the models that are supported: byte-level BPE; SentencePiece's,
    where a sign stands for a space and rare bytes are spelled out; and WordPiece, where a sign
    in front says that no space comes before. WordPiece's text is only as near as it gets: what
    the normaliser took (case, accents, white space) is in no token.
    """

    def __init__(
        self, byte_level: bool, space: str | None, strips_space: bool, joins: str | None = None
    ) -> None:
        self.byte_level = byte_level
        self.space = space
        self.strips_space = strips_space
        self.joins = joins

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, folder: Path) -> _Decoder:
        steps = list(_steps(tokenizer))
        kinds = [str(step["type"]) for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True, space=None, strips_space=False)
        if kinds == ["WordPiece"]:
            joins = str(steps[0].get("prefix", "##"))
            return cls(byte_level=False, space=None, strips_space=True, joins=joins)
        known = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
        space = next((sign for step in steps if (sign := _space_sign(step))), None)
        if space is None or not set(kinds) <= set(known):
            raise UnsupportedModelError(
                f"{folder / FILE_NAME} has a decoder of {' and '.join(kinds) or 'no kind'}, which"
                " is not supported; byte-level, SentencePiece and WordPiece ones are"
            )
        strips = any(
            step["type"] == "Strip" or step.get("prepend_scheme") in ("always", "first")
            for step in steps
        )
        return cls(byte_level=False, space=space, strips_space=strips)

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            return byte_level.to_bytes(token)
        if self.joins is not None:
            joined = token.startswith(self.joins)
            return (token.removeprefix(self.joins) if joined else f" {token}").encode()
        if match := _BYTE.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(self.space or "", " ").encode()


def _steps(tokenizer: tokenizers.Tokenizer) -> Iterator[dict[str, object]]:
    """The decoder's parts as tokenizer.json describes them."""
    if tokenizer.decoder is None:
        return
    # The state that is pickled is that description; writing all of tokenizer.json takes long.
    waiting = [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step["decoders"], *waiting]
        else:
            yield step


def _space_sign(step: Mapping[str, object]) -> str | None:
    """The sign that a step of a decoder turns into a space."""
    if step["type"] == "Metaspace":
        return str(step.get("replacement", _SPACE))
    if step["type"] == "Replace" and step.get("content") == " ":
        pattern = step.get("pattern")
        return str(pattern.get("String")) if isinstance(pattern, dict) else None
    return None
