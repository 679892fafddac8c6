"""Text to token ids and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from trimaran.core.errors import RequestError
from trimaran.models.incremental import IncrementalEncoder
from trimaran.models.seams import Seams
from trimaran.models.vocabulary import Vocabulary


class Tokenizer:
    """A model's tokenizer. Never changes, so threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = vocabulary.eos_token_id
        self.special_ids = vocabulary.special_ids

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata; its ids are llama.cpp's.

        Raises:
            CheckpointError: a key is missing or unsound.
            UnsupportedModelError: another kind of tokenizer or pre-tokenizer.
        """
        from trimaran.models.gguf_tokenizer import read_gguf_vocabulary

        return cls(read_gguf_vocabulary(metadata))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json,
        special_tokens_map.json.

        Raises:
            CheckpointError: a file is missing or unsound.
            UnsupportedModelError: tokens whose bytes can't be told.
        """
        from trimaran.models.folder_tokenizer import read_folder_vocabulary

        return cls(read_folder_vocabulary(Path(folder)))

    @property
    def add_bos(self) -> bool:
        """Whether a prompt starts with the begin-of-sequence token."""
        return self.bos_token_id is not None and self.bos_token_id in self._vocabulary.prefix

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that the model wants before a prompt."""
        return self._vocabulary.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """Tokens that the model wants after a prompt."""
        return self._vocabulary.suffix

    @functools.cached_property
    def seams(self) -> Seams | None:
        """Where a growing text can be cut; None where that isn't known."""
        return self._vocabulary.seams()

    def incremental(
        self, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> IncrementalEncoder:
        """Encodes one text that arrives in pieces; arguments as of `encode`."""
        return IncrementalEncoder(
            self, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put the tokens around it that the model wants around a prompt.
            parse_special: special tokens written out become those tokens; otherwise they are
                text like any other. Text of strangers wants False: it could end its turn.

        Raises:
            RequestError: the text has half of a surrogate pair, which no encoding can hold.
        """
        self.check_text(text)
        ids = self._vocabulary.encoder.encode(text, parse_special)
        if add_special_tokens:
            return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix]
        return ids

    @staticmethod
    def check_text(text: str) -> None:
        """Raises `RequestError` where a text can't be encoded."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half of a surrogate pair (U+{ord(text[error.start]):04X} at"
                f" character {error.start}); it can't be encoded"
            ) from None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            RequestError: a negative id.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in ids if token not in skipped])
        if self._vocabulary.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token, perhaps a part of a character; a special token's are
        its name. An id that stands for nothing, such as the padding of an output layer
        beyond `vocab_size`, has none.

        Raises:
            RequestError: a negative id.
        """
        if token < 0:
            raise RequestError(f"token id {token} is negative; ids are 0 to {self.vocab_size - 1}")
        return self._vocabulary.piece(token) if token < self.vocab_size else b""
