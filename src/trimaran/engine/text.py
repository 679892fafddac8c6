"""From tokens to text, as they come: whole characters, and stop strings held back."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextStream:
    """The text of one sequence, emitted only once it is certain.

    Two things are held back: bytes that don't make a whole character yet, and characters
    that may turn out to begin a stop string. What was emitted never changes.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        hidden: frozenset[int] = frozenset(),
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        """
        Args:
            token_bytes: the exact bytes of a token.
            hidden: tokens without text of their own (special tokens to be skipped).
            stops: strings that end the text.
            include_stop: emit the stop string that was found.
        """
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._stops = stops
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int, look_for_stops: bool = True) -> tuple[str, str | None]:
        """Adds a token; returns (text now certain, the stop string found or None).

        With `look_for_stops` false (before `min_tokens`) stop strings pass as plain text.
        """
        if token not in self._hidden:
            self._held += self._decoder.decode(self._token_bytes(token))
        return self._emit(look_for_stops)

    def finish(self) -> str:
        """Whatever is still held, once no token follows; half a character becomes U+FFFD."""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return rest

    def _emit(self, look_for_stops: bool) -> tuple[str, str | None]:
        text = self._held
        if not self._stops or not look_for_stops:
            self._held = ""
            return text, None
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            place, stop = min(found)
            self._held = ""
            self._decoder.reset()
            return text[: place + len(stop) if self._include_stop else place], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
