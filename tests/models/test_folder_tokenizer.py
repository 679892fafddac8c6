"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.hard_strings import HARD_STRINGS
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from trimaran.core.errors import CheckpointError, RequestError, UnsupportedModelError
from trimaran.models.gguf import GGUFFile
from trimaran.models.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "h", "e", "l", "o", "▁h", "el", "▁hel", "lo", "▁hello"]
MERGES = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o"), ("▁hel", "lo")]


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(smollm2_path: Path) -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer as its makers describe it, from the file's own tables."""
    metadata = GGUFFile.open(smollm2_path).metadata
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    merges: Any = metadata["tokenizer.ggml.merges"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens[:17]])
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """As Llama 2's: a sign for a space, rare characters as bytes, one space put in front."""
    vocabulary = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, MERGES, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


@pytest.fixture(scope="module")
def both(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a folder and that of a GGUF file, of one model."""
    folder = save(
        byte_level(smollm2_path),
        tmp_path_factory.mktemp("folder"),
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>", "__type": "AddedToken"},
    )
    metadata = GGUFFile.open(smollm2_path).metadata
    return Tokenizer.from_folder(folder), Tokenizer.from_gguf(metadata)


def test_a_folder_is_the_gguf_files_equal(both: tuple[Tokenizer, Tokenizer]) -> None:
    own, other = both
    assert own.vocab_size == other.vocab_size
    assert own.special_ids == other.special_ids
    assert (own.bos_token_id, own.eos_token_id, own.add_bos) == (1, 2, False)
    for text in HARD_STRINGS:
        for parse_special in (True, False):
            ids = own.encode(text, parse_special=parse_special)
            assert ids == other.encode(text, parse_special=parse_special), text
            assert own.decode(ids) == other.decode(ids)
    every = range(own.vocab_size + 3)
    assert list(map(own.token_bytes, every)) == list(map(other.token_bytes, every))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=40))
def test_text_comes_back(text: str, both: tuple[Tokenizer, Tokenizer]) -> None:
    own, other = both
    ids = own.encode(text)
    assert own.decode(ids) == other.decode(other.encode(text))


def test_sentence_piece(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(
        save(sentence_piece(), tmp_path, bos_token="<s>", eos_token="</s>")
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.special_ids == {0, 1, 2}
    hello = 3 + 256 + WORDS.index("▁hello")
    ids = tokenizer.encode("hello é hello")
    assert ids[:2] == [1, hello] and ids[-1] == hello
    assert tokenizer.token_bytes(hello) == b" hello"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello é hello"
    assert tokenizer.decode(ids[1:-1]) == "hello é"
    spelled = tokenizer.encode("é", add_special_tokens=False)[1:]
    assert [tokenizer.token_bytes(token) for token in spelled] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(spelled[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    literal = tokenizer.encode("</s>", add_special_tokens=False, parse_special=False)
    assert 2 not in literal
    assert tokenizer.decode(literal) == "</s>"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, "▁"]),
        ({"add_bos_token": True}, [1, "▁"]),
        ({"add_bos_token": False}, ["▁"]),
        ({"add_bos_token": None, "add_eos_token": True}, [1, "▁", 2]),
        ({"add_eos_token": False}, [1, "▁"]),
    ],
)
def test_tokens_around_a_prompt(
    config: dict[str, Any], expected: list[int | str], tmp_path: Path
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer.from_folder(save(sentence_piece(), tmp_path, **names, **config))
    sign = 3 + 256 + WORDS.index("▁")
    assert tokenizer.encode("") == [token for token in expected if token != "▁"]
    assert tokenizer.encode(" ", add_special_tokens=False)[:1] == [sign]
    ids = tokenizer.encode(" ")
    assert (ids[0] == 1, ids[-1] == 2) == (1 in expected, 2 in expected)
    assert tokenizer.add_bos == (1 in expected)


def test_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    save(sentence_piece(), tmp_path, eos_token="<unk>")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_ids_that_stand_for_nothing(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 5}, []))
    tokenizer.decoder = decoders.ByteLevel()
    own = Tokenizer.from_folder(save(tokenizer, tmp_path))
    assert own.vocab_size == 6
    assert own.decode([0, 1, 2, 5, 6, 99]) == "ab"
    assert (own.bos_token_id, own.eos_token_id) == (None, None)


def test_truncation_and_padding_of_the_file_are_not_ours(tmp_path: Path) -> None:
    tokenizer = sentence_piece()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    own = Tokenizer.from_folder(save(tokenizer, tmp_path))
    assert len(own.encode("hello hello hello hello hello hello")) == 7


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    own = Tokenizer.from_folder(save(sentence_piece(), tmp_path))
    for parse_special in (True, False):
        with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
            own.encode("ab\ud83d", parse_special=parse_special)


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer.json$"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match="it has tokenizer.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "X"}}', "\0\xff"])
def test_an_unsound_tokenizer_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer.json is not a sound tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"bos_token": "<bos>"}, "bos_token is '<bos>', which tokenizer.json doesn't know"),
        ({"eos_token": 3}, "eos_token of tokenizer_config.json .* is 3, not a token's text"),
        ({"eos_token": {"content": 1}}, "not a token's text"),
        ({"bos_token": "<s>", "add_bos_token": "yes"}, "add_bos_token .*'yes', not true or false"),
    ],
)
def test_an_unsound_tokenizer_config(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    save(sentence_piece(), tmp_path, **config)
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.from_folder(tmp_path)


def test_foreign_decoders_are_refused_by_name(tmp_path: Path) -> None:
    tokenizer = sentence_piece()
    for decoder, name in ((decoders.BPEDecoder(), "BPEDecoder"), (decoders.CTC(), "CTC")):
        tokenizer.decoder = decoder
        save(tokenizer, tmp_path)
        with pytest.raises(UnsupportedModelError, match=f"decoder of {name}"):
            Tokenizer.from_folder(tmp_path)
    bare = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(UnsupportedModelError, match="decoder of no kind"):
        Tokenizer.from_folder(save(bare, tmp_path))


def test_metaspace(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁hello", -1.0), ("▁", -2.0), ("h", -3.0)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    own = Tokenizer.from_folder(save(tokenizer, tmp_path))
    assert own.decode(own.encode("hello hello h")) == "hello hello h"
    assert own.token_bytes(1) == b" hello"


def test_word_piece(minilm_path: Path) -> None:
    """Ids as of `tokenizers`; the text as near as lower-case pieces get."""
    tokenizer = Tokenizer.from_folder(minilm_path)
    other = tokenizers.Tokenizer.from_file(str(minilm_path / "tokenizer.json"))
    other.no_truncation()
    other.no_padding()
    for text in ("A naïve café.", "unbelievably", "东京 x_y  z\n", "", "[SEP] [MASK] ##a"):
        assert tokenizer.encode(text) == other.encode(text).ids
    assert tokenizer.prefix == (101,)
    assert tokenizer.suffix == (102,)
    assert tokenizer.decode(tokenizer.encode("Embeddings", add_special_tokens=False)) == (
        "embeddings"
    )
    assert tokenizer.decode([101, 7592, 2088, 102], skip_special_tokens=True) == "hello world"
    assert tokenizer.seams is None  # so a growing text is held back
