"""Tokens of a text that arrives piece by piece, as soon as nothing can change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimaran.models.tokenizer import Tokenizer

_PORTION = 64
"""Characters that are worth encoding the whole text again for."""


class IncrementalEncoder:
    """Gives the tokens of a growing text; in the end they are those of the whole text.

    What is given out is certain: it never changes, whatever is appended. What comes after the
    last seam (see `models/seams.py`) is held back. A tokenizer without known seams holds all
    back until the end.

    Cost: of an append, that of encoding what is held back and new. Where halves of a text
    can't be encoded apart, the whole is encoded again whenever a tenth has been added.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> None:
        """Arguments as of `Tokenizer.encode`."""
        self._tokenizer = tokenizer
        self._around = add_special_tokens
        self._parse_special = parse_special
        self._seams = tokenizer.seams
        self._pieces: list[str] = []
        self._held = ""  # not given out yet
        self._begun = False
        self._given = 0  # tokens, those before the text not counted

    @property
    def text(self) -> str:
        """All that was appended."""
        return "".join(self._pieces)

    def append(self, text: str) -> list[int]:
        """Takes more text; the tokens that are certain now and weren't before.

        Raises:
            RequestError: the text has half of a surrogate pair. It is not taken then.
        """
        self._tokenizer.check_text(text)
        self._pieces.append(text)
        self._held += text
        place = 0 if self._seams is None else self._seams.last(self._held)
        ids: list[int] = []
        if place and self._worth_it(place):
            ids = self._take(place)
        return self._begin() + ids

    def finish(self) -> list[int]:
        """The tokens that are left; nothing may be appended afterwards."""
        begin = self._begin()
        suffix = self._tokenizer.suffix if self._around else ()
        return [*begin, *self._take(len(self._held)), *suffix]

    def _worth_it(self, place: int) -> bool:
        assert self._seams is not None
        if self._seams.halves:
            return True
        before = sum(map(len, self._pieces)) - len(self._held)
        return place >= max(_PORTION, before // 10)

    def _begin(self) -> list[int]:
        if self._begun:
            return []
        self._begun = True
        return list(self._tokenizer.prefix) if self._around else []

    def _take(self, place: int) -> list[int]:
        """Tokens of what is held up to a place, which is given out."""
        done, self._held = self._held[:place], self._held[place:]
        if self._seams is None or self._seams.halves:
            return self._encode(done)
        whole = self.text
        ids = self._encode(whole[: len(whole) - len(self._held)])
        fresh = ids[self._given :]
        self._given = len(ids)
        return fresh

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(
            text, add_special_tokens=False, parse_special=self._parse_special
        )
