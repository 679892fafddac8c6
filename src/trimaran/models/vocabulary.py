"""What a tokenizer is made of, whichever file it was read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trimaran.models.seams import Seams


class TextEncoder(Protocol):
    """From text to ids; safe to call from several threads."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of `text` alone, without the tokens that a model puts around a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens and how text becomes them.

    Attributes:
        encoder: makes ids of text.
        size: ids are 0 .. size - 1; some of them may stand for nothing.
        piece: the bytes of an id below `size`; empty where it stands for nothing.
        special_ids: control tokens: no text of their own, to be skipped in answers.
        prefix: ids that the model wants before a prompt.
        suffix: ids that the model wants after a prompt.
        seams: says where a growing text can be cut; None: nobody knows. Called when needed.
        strips_space: the text of a whole sequence loses one leading space (SentencePiece).
    """

    encoder: TextEncoder
    size: int
    piece: Callable[[int], bytes]
    special_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_id: int | None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    strips_space: bool = False
    seams: Callable[[], Seams | None] = lambda: None
