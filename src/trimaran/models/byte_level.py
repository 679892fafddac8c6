"""The bytes behind the printable characters of byte-level BPE vocabularies.

GPT-2's alphabet (Radford et al., Language models are unsupervised multitask learners, 2019;
`bytes_to_unicode` of its published encoder): bytes that print in Latin-1 stand for
themselves, the other 68 for the characters from U+0100 on, in order.
"""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(0x100) if byte not in _PRINTABLE)

CHARACTERS: tuple[str, ...] = tuple(
    chr(byte) if byte in _PRINTABLE else chr(0x100 + _HIDDEN.index(byte)) for byte in range(0x100)
)
"""The character of each byte."""

_BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}


def to_bytes(token: str) -> bytes:
    """What a byte-level token stands for; one with foreign characters is its own UTF-8."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")
