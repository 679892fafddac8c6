"""The forms a prompt may come in."""

from __future__ import annotations

from collections.abc import Sequence

from trimaran.core.errors import RequestError
from trimaran.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt; text gets the model's begin-of-sequence token where it wants one.

    Raises:
        RequestError: neither text nor whole numbers.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    ids = list(prompt)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"a prompt of token ids has {token!r} in it; give whole numbers")
    return ids


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt that came as text."""
    return prompt if isinstance(prompt, str) else None
