"""Token ids of a text by the `tokenizers` package, without stopping the other threads."""

from __future__ import annotations

from tokenizers import Tokenizer

LONG_TEXT = 10_000
"""Characters from which on the batch interface is worth its threads."""


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids, without special tokens around them.

    `Tokenizer.encode` holds the interpreter's lock to its end, for a second and more where a
    text has a million characters; `encode_batch_fast` doesn't, and makes no offsets.
    """
    if len(text) < LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
