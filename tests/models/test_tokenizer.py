"""Tokenizers of GGUF files against llama.cpp's own, on the same file."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle.llama_cpp import LlamaCppOracle
from support.hard_strings import HARD_STRINGS
from support.pair_vocabulary import SPECIAL, byte_characters, pair_keys, write_pair_gguf

from trimaran.core.errors import CheckpointError, RequestError, UnsupportedModelError
from trimaran.models.gguf import GGUFFile
from trimaran.models.gguf_tokenizer import PRE_TOKENIZERS
from trimaran.models.tokenizer import Tokenizer

FAMILIES = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")

# Characters of Unicode 16, which `tokenizers` knows and llama.cpp doesn't.
NEW = (
    (0x1B4E, 0x1B4F), (0x1B7F, 0x1B7F), (0x1C89, 0x1C8A), (0xA7CB, 0xA7DC), (0x105C0, 0x105F3),
    (0x10D40, 0x10D8F), (0x10EC2, 0x10EC4), (0x11380, 0x113E2), (0x116D0, 0x116E3),
    (0x11BC0, 0x11BF9), (0x13460, 0x143FA), (0x16100, 0x16139), (0x16D40, 0x16D79),
    (0x18CFF, 0x18CFF), (0x1CC00, 0x1CCF9), (0x1E5D0, 0x1E5FF),
)  # fmt: skip

CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(
    lambda character: not any(first <= ord(character) <= last for first, last in NEW)
)

ATOMS = [
    *"  \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u3000\u2028abcsdtmlvreSDTMLVRE''''\u2019\"",
    *"!?.,;-_/\\|<>=+^~`$#",
    *"()[]{}0123456789½²٣४\u0300\u200d👩🏽ß漢字あ한עשα\x00\x01\x04\x7f\ufeff\ufffd𝟘𐍈",
    *("'s", "'LL", "  ", "\r\n", "\n\n", "n't", "<|", "|>", *SPECIAL),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>"),
]  # fmt: skip

TEXTS = st.text(CHARACTERS, max_size=60) | st.lists(st.sampled_from(ATOMS), max_size=24).map(
    "".join
)

oracle_examples = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass
class Pair:
    """The tokenizer and the oracle of one file."""

    tokenizer: Tokenizer
    oracle: LlamaCppOracle

    def check(self, text: str) -> None:
        for parse_special in (True, False):
            own = self.tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
            assert own == self.oracle.tokenize(text, parse_special), (text, parse_special)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Pair]:
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(smollm2_path).metadata)
    with LlamaCppOracle(smollm2_path, n_ctx=256) as oracle:
        yield Pair(tokenizer, oracle)


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """All pairs of bytes as tokens, under the pre-tokenizer of each family."""
    keys = pair_keys(request.param)
    path = write_pair_gguf(tmp_path_factory.mktemp("pairs") / "pairs.gguf", keys)
    with LlamaCppOracle(path, n_ctx=256) as oracle:
        yield Pair(Tokenizer.from_gguf(keys), oracle)
    path.unlink()


# ---------------------------------------------------------------------- against llama.cpp


@pytest.mark.parametrize("text", HARD_STRINGS)
def test_hard_strings_of_smollm2(text: str, smollm2: Pair) -> None:
    smollm2.check(text)


def test_all_hard_strings_as_one_text(smollm2: Pair) -> None:
    smollm2.check("".join(HARD_STRINGS))


@oracle_examples
@given(text=TEXTS)
def test_random_text_of_smollm2(text: str, smollm2: Pair) -> None:
    smollm2.check(text)


def test_hard_strings_of_each_family(family: Pair) -> None:
    for text in HARD_STRINGS:
        family.check(text)


@oracle_examples
@given(text=TEXTS)
def test_random_text_of_each_family(text: str, family: Pair) -> None:
    family.check(text)


def test_characters_of_every_kind(family: Pair) -> None:
    """Each one between letters, digits, signs and spaces, so that its class shows."""
    new = {code for first, last in NEW for code in range(first, last + 1)}
    codes = [*range(0x3100), *range(0x3100, 0xD800, 61), *range(0xE000, 0x20000, 61)]
    chosen = [chr(code) for code in codes if code not in new]
    for start in range(0, len(chosen), 64):
        some = chosen[start : start + 64]
        family.check("\n".join(f"a{c}a1{c}1!{c}! {c} {c}{c}  {c}'{c}" for c in some))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_name_is_the_one_that_llama_cpp_knows(name: str, tmp_path: Path) -> None:
    paired = {*b" \t\r\nabcdstmlvreSDLT'!.,<=$0123", *"é漢٣ß\u00a0".encode()}
    keys = pair_keys(name, paired)
    path = write_pair_gguf(tmp_path / "pairs.gguf", keys)
    draw = random.Random(name)
    with LlamaCppOracle(path, n_ctx=256) as oracle:
        pair = Pair(Tokenizer.from_gguf(keys), oracle)
        for _ in range(200):
            pair.check("".join(draw.choices(" \t\r\nabcstlvreSDL''!.,<$0123é漢٣ß\u00a0", k=12)))


def test_bytes_and_merges_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    characters = byte_characters()
    bytes_ = [characters[byte] for byte in (0x04, 0xF0, ord("q"))]
    keys = pair_keys("smollm", b" abcdq\x04.", missing=[*bytes_, "ab", "cd"])
    path = write_pair_gguf(tmp_path / "pairs.gguf", keys)
    draw = random.Random(0)
    with LlamaCppOracle(path, n_ctx=256) as oracle:
        pair = Pair(Tokenizer.from_gguf(keys), oracle)
        ids = pair.tokenizer.encode("b\x04d ab.😀.q.cd")
        assert b"".join(map(pair.tokenizer.token_bytes, ids)) == b"bd ab.\x9f\x98\x80..cd"
        for _ in range(300):
            pair.check("".join(draw.choices("  aabbccddq\x04.😀", k=14)))


# ---------------------------------------------------------------------- back to text


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, parse_special=st.booleans())
def test_decode_reverses_encode(text: str, parse_special: bool) -> None:
    tokenizer = PAIRS
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


PAIRS = Tokenizer.from_gguf(pair_keys("qwen2", b" abcdefghijklmnopqrstuvwxyz"))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS)
def test_decode_reverses_encode_of_smollm2(text: str, smollm2: Pair) -> None:
    tokenizer = smollm2.tokenizer
    lacking = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # bytes without a token
    data = bytes(byte for byte in text.encode() if byte not in lacking)
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_special_tokens_may_be_skipped(smollm2: Pair) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode("<|im_start|>user\nhé<|im_end|>\n")
    assert tokenizer.decode(ids) == "<|im_start|>user\nhé<|im_end|>\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhé\n"
    assert {1, 2} <= set(ids) & tokenizer.special_ids


def test_one_character_over_several_tokens(smollm2: Pair) -> None:
    ids = smollm2.tokenizer.encode("𒀀")
    assert len(ids) > 1
    assert smollm2.tokenizer.decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert b"".join(map(smollm2.tokenizer.token_bytes, ids)).decode() == "𒀀"


def test_every_token_has_bytes(smollm2: Pair) -> None:
    tokenizer = smollm2.tokenizer
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert tokenizer.vocab_size == smollm2.oracle.vocab_size == len(set(pieces)) == 49152
    assert all(pieces)
    assert pieces[2] == b"<|im_end|>"


# ---------------------------------------------------------------------- what the file says


def test_facts_of_smollm2(smollm2: Pair) -> None:
    tokenizer = smollm2.tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.special_ids == frozenset(range(17))


def keys(**changed: Any) -> dict[str, Any]:
    """Of a tokenizer with letters for tokens; None leaves a key out."""
    found = pair_keys(**{"pre": "gpt-2", "paired": b" ", **changed})
    return {key: value for key, value in found.items() if value is not None}


def test_tokens_around_a_prompt() -> None:
    plain = Tokenizer.from_gguf(keys())
    begin, end = plain.bos_token_id, plain.eos_token_id
    assert begin is not None and end is not None
    a = plain.encode("a")
    assert len(a) == 1 and not plain.add_bos
    for changed, expected in (
        ({"add_bos_token": True}, [begin, *a]),
        ({"add_eos_token": True}, [*a, end]),
        ({"add_bos_token": True, "add_eos_token": True}, [begin, *a, end]),
        ({"pre": "llama-bpe"}, [begin, *a]),
        ({"pre": "llama-bpe", "add_bos_token": False}, a),
        ({"bos_token_id": None}, a),
    ):
        tokenizer = Tokenizer.from_gguf(keys(**changed))
        assert tokenizer.encode("a") == expected
        assert tokenizer.encode("a", add_special_tokens=False) == a
        assert tokenizer.add_bos == (expected[0] == begin)


def test_kinds_of_tokens() -> None:
    base = keys()
    tokens = [*base["tokenizer.ggml.tokens"], "[PAD]", "<0x0A>", "öl"]
    kinds = [*base["tokenizer.ggml.token_type"], 5, 6, 4]
    tokenizer = Tokenizer.from_gguf(keys(tokens=tokens, token_type=kinds))
    pad, newline, oil = range(len(tokens) - 3, len(tokens))
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_bytes(pad) == b""
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_bytes(oil) == "öl".encode()
    # Padding of an output layer beyond the vocabulary.
    assert tokenizer.token_bytes(len(tokens)) == tokenizer.token_bytes(10**9) == b""
    assert tokenizer.decode([len(tokens) + 5]) == ""
    assert oil in tokenizer.encode("öl", parse_special=False)
    assert {pad, newline, oil}.isdisjoint(tokenizer.special_ids)
    with pytest.raises(RequestError, match="-1 is negative"):
        tokenizer.decode([-1])


def test_without_kinds_all_tokens_are_plain() -> None:
    tokenizer = Tokenizer.from_gguf(keys(token_type=None))
    assert tokenizer.special_ids == frozenset()
    assert len(tokenizer.encode("<|end|>")) == 7


def test_half_a_surrogate_pair_is_refused() -> None:
    for text in ("ok \ud83d", "\udc00", "<|end|>\ud800"):
        with pytest.raises(RequestError, match="half of a surrogate pair .U.D8|half .*U.DC"):
            PAIRS.encode(text)


def test_a_file_without_a_pre_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    for pre in (None, ""):
        caplog.clear()
        tokenizer = Tokenizer.from_gguf(keys(pre=pre))
        assert "doesn't name its pre-tokenizer" in caplog.text
        assert tokenizer.encode("a1234") == Tokenizer.from_gguf(keys(pre="default")).encode("a1234")


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"model": None}, CheckpointError, "tokenizer.ggml.model is missing"),
        ({"model": "llama"}, UnsupportedModelError, "model is 'llama', which is not supported"),
        ({"pre": "qwen3"}, UnsupportedModelError, "pre is 'qwen3'.*mean 'qwen2'.*smollm"),
        ({"pre": 3}, UnsupportedModelError, "pre is 3"),
        ({"tokens": None}, CheckpointError, "tokens is missing"),
        ({"tokens": ["a", 1]}, CheckpointError, "tokens is not a list of texts"),
        ({"merges": None}, CheckpointError, "merges is missing"),
        ({"merges": "a b"}, CheckpointError, "merges is not a list"),
        ({"merges": ["ab"]}, CheckpointError, "merges has 'ab'"),
        ({"merges": ["a b", " b"]}, CheckpointError, "merges has ' b'"),
        ({"token_type": [1, 2]}, CheckpointError, "token_type has 2 values for"),
        ({"token_type": ["x"]}, CheckpointError, "token_type is not a list of whole"),
        ({"bos_token_id": 10**6}, CheckpointError, "bos_token_id is 1000000, not a token id"),
        ({"eos_token_id": -1}, CheckpointError, "eos_token_id is -1"),
        ({"eos_token_id": True}, CheckpointError, "eos_token_id is True"),
        ({"add_bos_token": 1}, CheckpointError, "add_bos_token is 1, neither true nor false"),
        (
            {"add_bos_token": True, "bos_token_id": None},
            CheckpointError,
            "bos_token_id is missing, though",
        ),
    ],
)
def test_unsound_keys_are_refused_by_name(
    changed: dict[str, Any], error: type[Exception], match: str
) -> None:
    base = keys()
    for key, value in changed.items():
        base[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(error, match=match):
        Tokenizer.from_gguf({key: value for key, value in base.items() if value is not None})


def test_threads_share_a_tokenizer(smollm2: Pair) -> None:
    texts = [text * 3 for text in HARD_STRINGS]
    expected = [smollm2.tokenizer.encode(text) for text in texts]
    wrong: list[str] = []

    def work(start: int) -> None:
        for i in range(len(texts)):
            place = (start + i) % len(texts)
            if smollm2.tokenizer.encode(texts[place]) != expected[place]:
                wrong.append(texts[place])

    threads = [threading.Thread(target=work, args=(7 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
