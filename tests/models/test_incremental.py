"""Text that arrives in pieces: its tokens are those of the whole text, whatever the pieces."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.folder_tokenizers import KINDS, UNKNOWN, save
from support.hard_strings import HARD_STRINGS
from support.pair_vocabulary import SPECIAL, pair_keys

from trimaran.core.errors import RequestError
from trimaran.models.gguf import GGUFFile
from trimaran.models.gguf_tokenizer import PRE_TOKENIZERS
from trimaran.models.tokenizer import Tokenizer

GGUF = [f"gguf {name}" for name in sorted({id(p): n for n, p in PRE_TOKENIZERS.items()}.values())]
NAMES = [*GGUF, *KINDS, *UNKNOWN]

ATOMS = [
    *"   \t\n\r\x0b\x1c\x85\u00a0\u2003\u3000\u2028\u180e\u200babcsdtlKSDTLVRE''''\u2019\"",
    *"!?.,;-_/\\|<>=+^~`$#()[]{}0123456789½²٣४\u0300\u0301\u200d👩🏽ß漢字、。！あ한עשα▁",
    *"\u0958\u037e\u212a\u1fef\u1100\u1161\u11a8e\u0345\u0f71\ufb1d\u00e9\x00\x04\ufeff𝟘𐍈",
    *("'s", "'LL", "  ", "\r\n", "\n\n", "n't", "<|", "|>", " <", "> ", *SPECIAL),
    *("<|end|>", "<two words>", "<two ", "words>", "<left>", "<right>", "<K;>", "<\u212a;>"),
    *("<K", " d>", "<\u212a d>", "<\u212a"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "word", " word", " the", "it's "),
]  # fmt: skip

TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(ATOMS), max_size=30).map("".join)

examples = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    name = str(request.param)
    if name in GGUF:
        return Tokenizer.from_gguf(pair_keys(name.removeprefix("gguf ")))
    make = (KINDS | UNKNOWN)[name]
    return Tokenizer.from_folder(save(make(), tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(smollm2_path).metadata)


def check(tokenizer: Tokenizer, pieces: Sequence[str]) -> None:
    """What is given out at each piece begins the tokens of the whole, and is all in the end."""
    for parse_special in (True, False):
        whole = tokenizer.encode("".join(pieces), parse_special=parse_special)
        encoder = tokenizer.incremental(parse_special=parse_special)
        given: list[int] = []
        for piece in pieces:
            given += encoder.append(piece)
            assert given == whole[: len(given)], (pieces, piece)
        assert given + encoder.finish() == whole, pieces


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@examples
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_of_random_text(text: str, places: list[int], tokenizer: Tokenizer) -> None:
    check(tokenizer, cut(text, places))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS)
def test_character_by_character(text: str, tokenizer: Tokenizer) -> None:
    check(tokenizer, list(text))


def test_every_cut_of_every_hard_string(tokenizer: Tokenizer) -> None:
    for text in HARD_STRINGS:
        for place in range(0, len(text) + 1, 1 if len(text) < 60 else 13):
            check(tokenizer, [text[:place], text[place:]])


# Added tokens with spaces inside, behind and in front of them, and under a normaliser.
ADDED = (
    "a<right> b c",
    "a <right>  <right> b",
    "a <left> b",
    "x <two words> y <two word",
    "x <K d> y <K d",
    "x <\u212a d> y <\u212a d",
    "x <\u212a\u037e> y",
    "<|end|> <|end <|begin|>",
    "a <|im_end|> b",
)


def test_every_two_cuts_around_added_tokens(tokenizer: Tokenizer) -> None:
    for text in ADDED:
        for first in range(len(text)):
            for second in range(first, len(text)):
                check(tokenizer, [text[:first], text[first:second], text[second:]])


@examples
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=8))
def test_smollm2(text: str, places: list[int], smollm2: Tokenizer) -> None:
    check(smollm2, cut(text, places))


def test_all_hard_strings_as_one_text_in_small_pieces(smollm2: Tokenizer) -> None:
    text = "".join(HARD_STRINGS)
    for size in (1, 5, 97):
        check(smollm2, [text[i : i + size] for i in range(0, len(text), size)])


def test_little_is_held_back(smollm2: Tokenizer) -> None:
    """Otherwise holding everything back would pass."""
    text = "The harbour master kept two ledgers; in the first he wrote the name of every ship. " * 8
    encoder = smollm2.incremental()
    given = [token for character in text for token in encoder.append(character)]
    assert len(smollm2.encode(text)) - len(given) <= 3
    encoder = smollm2.incremental()
    chinese = "今天天气很好，我们去公园吧！他说：明天见。"
    assert encoder.append(chinese) == smollm2.encode("今天天气很好，我们去公园吧！他说：明天见")
    assert encoder.finish() == smollm2.encode("。")


@pytest.mark.parametrize("name", KINDS)
def test_something_is_given_out_early_by_each_known_kind(name: str, tmp_path: Path) -> None:
    encoder = Tokenizer.from_folder(save(KINDS[name](), tmp_path)).incremental()
    text = "several words of plain text " * 20
    given = encoder.append(text)
    assert len(given) > 0.8 * (len(given) + len(encoder.finish()))


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_kind_holds_everything_back(name: str, tmp_path: Path) -> None:
    encoder = Tokenizer.from_folder(save(UNKNOWN[name](), tmp_path)).incremental()
    assert encoder.append("several words of plain text ") == []


def test_half_of_a_surrogate_pair_is_refused_and_not_taken(smollm2: Tokenizer) -> None:
    encoder = smollm2.incremental()
    given = encoder.append("good ")
    with pytest.raises(RequestError, match="surrogate"):
        encoder.append("bad \ud83d")
    given += encoder.append("text")
    assert given + encoder.finish() == smollm2.encode("good text")


def test_no_sign_after_letters_is_joined_to_them_by_a_normaliser() -> None:
    """What rule B rests on, over all of Unicode: letters that stay as they are, before signs."""
    from trimaran.models.seams import _follows_letters, _is_letter

    letters = [chr(code) for code in range(0x110000) if _is_letter(chr(code))]
    signs = [chr(code) for code in range(0x110000) if _follows_letters(chr(code))]
    assert len(letters) > 100_000 and len(signs) > 70
    for sign in signs:
        for letter in letters[:: 1 if sign == ";" else 97]:
            assert unicodedata.normalize("NFC", letter + sign) == letter + sign
