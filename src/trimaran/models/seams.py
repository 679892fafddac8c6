"""Where a text can be cut so that what follows changes no token before the cut.

Let `encode(T)` be the tokens of a whole text. A place p of a text T is a seam if for every
continuation U the tokens of T + U begin with `encode(T[:p])`; where both halves are
independent, `encode(T + U) = encode(T[:p]) + encode(T[p:] + U)`. Then the tokens before p can
be computed while the rest still arrives.

A tokenizer works in stages, and p is a seam if no stage looks across it:

1. Added tokens ("<|im_end|>") are found in the text, wherever they stand. So none may begin
   before p and end behind it: neither one that is there, nor one that a later text could make
   whole. So p isn't inside of the longest end of T that begins such a token.
2. A normaliser may join characters (NFC). It joins none with a following ASCII character.
3. A pre-tokenizer cuts what is left into words by a regular expression, from left to right,
   without looking back. Every alternative of the expressions that are known here is a run of
   one class with at most one other character in front, or white space; none has a character
   that is no white space followed by a space. So a word ends between such two, and whether
   something comes after T doesn't matter, since the space is there already (rule A). Letters
   are matched by runs of letters and by contractions ("'ll") alone, and both end where a
   character follows that is no letter; so there a word ends too (rule B; not where a pattern
   lets a contraction belong to the word before it).
4. Merges stay within a word. Where there are no words (SentencePiece without a pre-tokenizer),
   they stay within what no token of the vocabulary spans; the sign for a space is inside of
   none after another character, which is checked.

The last character of T is never certain, so a seam is before it: then its neighbour is known.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

_SPACE_SIGN = "\N{LOWER ONE EIGHTH BLOCK}"

_WIDE_SIGNS = frozenset("、。！，：；？")
"""Signs of texts that have no spaces: no letters, and normalisers don't join them to others."""


class Seams:
    """Finds seams for one tokenizer; never changes."""

    def __init__(
        self,
        added: Iterable[str],
        *,
        after_letters: bool,
        halves: bool,
        tabs: bool = True,
        swallowing: Iterable[str] = (),
        normal: Callable[[str], str] | None = None,
    ) -> None:
        """
        Args:
            added: tokens that are found in the text before it is cut into words.
            after_letters: whether rule B holds.
            halves: whether what follows a seam can be encoded by itself.
            tabs: whether rule A holds for tabs, too.
            swallowing: those of `added` that take white space after them in.
            normal: what the normaliser does, where there is one.
        """
        texts = sorted({text for text in added if text}, key=len, reverse=True)
        self.halves = halves
        self._after_letters = after_letters
        self._blanks = " \t" if tabs else " "
        self._swallowing = tuple(text for text in swallowing if text)
        self._normal = normal
        self._longest = len(texts[0]) if texts else 0
        self._begun = {text[:size] for text in texts for size in range(1, len(text))}
        self._any = re.compile(f"(?=({'|'.join(map(re.escape, texts))}))") if texts else None

    def last(self, text: str) -> int:
        """The last seam of a text, 0 where it has none."""
        for place in range(min(len(text) - 1, self._certain(text)), 0, -1):
            if self._between_words(text, place) and not self._inside_added(text, place):
                return place
        return 0

    def _certain(self, text: str) -> int:
        """Where the longest end of the text begins that may become an added token."""
        tail = text[-self._longest :] if self._longest else ""
        for size in range(min(self._longest - 1, len(tail)), 0, -1):
            if tail[-size:] in self._begun:
                return len(text) - size
        if self._normal is not None and not tail.isascii():
            normal = self._normal(tail)
            for size in range(min(self._longest - 1, len(normal)), 0, -1):
                if normal[-size:] in self._begun:
                    return len(text) - len(tail)
        return len(text)

    def _between_words(self, text: str, place: int) -> bool:
        before, after = text[place - 1], text[place]
        if after in self._blanks:
            return not before.isspace() and before != _SPACE_SIGN
        return self._after_letters and _is_letter(before) and _follows_letters(after)

    def _inside_added(self, text: str, place: int) -> bool:
        """Whether an added token reaches across the place."""
        if self._any is None:
            return False
        first = max(0, place - self._longest + 1)
        before, after = text[first:place], text[place : place + self._longest - 1]
        if before.endswith(self._swallowing) and self._swallowing:
            return True
        if self._crossed(before, after):
            return True
        if self._normal is None or (before.isascii() and after.isascii()):
            return False
        return self._crossed(self._normal(before), self._normal(after))

    def _crossed(self, before: str, after: str) -> bool:
        assert self._any is not None
        place = len(before)
        return any(
            found.start() < place < found.start() + len(found[1])
            for found in self._any.finditer(before + after)
        )


def _is_letter(character: str) -> bool:
    """One that is a letter to every version of Unicode since, normalised or not."""
    if character.isascii():
        return character.isalpha()
    return (
        unicodedata.category(character)[0] == "L"
        and unicodedata.normalize("NFC", character) == character
    )


def _follows_letters(character: str) -> bool:
    """No letter, and nothing that a normaliser joins to the character before it."""
    if character.isascii():
        return not character.isalpha()
    return character in _WIDE_SIGNS
