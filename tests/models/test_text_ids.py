"""Long texts take another way through the `tokenizers` package, to the same ids."""

from __future__ import annotations

import pytest
from support.hard_strings import HARD_STRINGS
from tokenizers import Tokenizer, models, pre_tokenizers

from trimaran.models.text_ids import LONG_TEXT, text_ids


@pytest.mark.parametrize("text", ["abab c", *HARD_STRINGS[:40]])
def test_a_long_text_has_the_ids_that_encode_gives(text: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ab", "abab", "Ġc"])}
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "c")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for length in (LONG_TEXT - 1, LONG_TEXT, 3 * LONG_TEXT):
        whole = (text * length)[:length] if text else ""
        assert text_ids(tokenizer, whole) == tokenizer.encode(whole).ids
