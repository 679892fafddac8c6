"""Flags are made from the fields of the option classes, all of them."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cli.options import (
    add_engine_flags,
    add_sampling_flags,
    attribute_docs,
    engine_options,
    sampling_options,
    size,
)
from trimaran.core.config import EngineConfig
from trimaran.core.sampling_params import SamplingParams

EVERY_FLAG = """
    --preset vllm --backend native --weights int8 --kv int8 --activations int8 --isa avx2
    --no-build-cache --threads 3 --max-model-len 99
    --block-size 8 --kv-cache-bytes 3MiB --kv-memory-fraction 0.25
    --kv-host-bytes 0 --kv-disk-path none --kv-disk-bytes 5MiB --kv-events none
    --max-num-seqs 5 --max-num-batched-tokens 77 --no-prefix-cache
    --index hash --order fcfs --chunking fixed --chunk-size 512
    --capacity max-utilization --max-waiting 9 --step-timeout 2.5 --engine-seed 11
    --n 2 --temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1
    --repetition-penalty 1.5 --presence-penalty -0.5 --frequency-penalty 0.25
    --logit-bias 5=-1.5 --logit-bias 6=2 --seed 4 --logprobs 1 --prompt-logprobs 0
    --stop a --stop b --stop-token-ids 1,2 --stop-token-ids 3 --max-tokens 9
    --min-tokens 1 --ignore-eos --include-stop-str-in-output
    --no-skip-special-tokens
"""


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_flags(parser)
    add_sampling_flags(parser, {})
    return parser.parse_args(words)


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_field_is_documented(cls: type) -> None:
    # The help text of a flag is the field's entry in the docstring.
    docs = attribute_docs(cls)
    assert docs.keys() == {field.name for field in fields(cls)}
    assert all(docs.values())


def test_nothing_given_leaves_every_default_alone() -> None:
    args = parse()
    assert engine_options(args) == {}
    assert sampling_options(args) == {}


def test_every_flag_reaches_its_field() -> None:
    args = parse(*EVERY_FLAG.split())
    engine, sampling = engine_options(args), sampling_options(args)
    assert engine.keys() == {field.name for field in fields(EngineConfig)}
    assert sampling.keys() == {field.name for field in fields(SamplingParams)}
    assert EngineConfig.from_mapping(engine) == EngineConfig(
        preset="vllm",
        backend="native",
        weights="int8",
        kv="int8",
        activations="int8",
        isa="avx2",
        build_cache=False,
        threads=3,
        max_model_len=99,
        block_size=8,
        kv_cache_bytes=3 << 20,
        kv_memory_fraction=0.25,
        kv_disk_bytes=5 << 20,
        max_num_seqs=5,
        max_num_batched_tokens=77,
        prefix_cache=False,
        chunk_size=512,
        max_waiting=9,
        step_timeout=2.5,
        seed=11,
    )
    assert SamplingParams.from_mapping(sampling) == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={5: -1.5, 6: 2.0},
        seed=4,
        logprobs=1,
        prompt_logprobs=0,
        stop=("a", "b"),
        stop_token_ids=(1, 2, 3),
        max_tokens=9,
        min_tokens=1,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )


def test_texts_reach_their_fields() -> None:
    words = ["--kv-disk-path", "/a b", "--kv-events", "tcp://*:1,topic=x", "--kv-host-bytes", "1G"]
    assert engine_options(parse(*words)) == {
        "kv_disk_path": "/a b",
        "kv_events": "tcp://*:1,topic=x",
        "kv_host_bytes": 1 << 30,
    }


def test_none_lifts_a_limit() -> None:
    assert sampling_options(parse("--max-tokens", "none")) == {"max_tokens": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-k", "many"], "'many' isn't a whole number"),
        (["--temperature", "hot"], "'hot' isn't a number"),
        (["--stop-token-ids", "1,x"], "'x' isn't a list of token ids"),
        (["--logit-bias", "5"], "a token id and an addend"),
        (["--kv-cache-bytes", "much"], "'much' is no size"),
    ],
)
def test_a_value_that_cannot_be_read(words: list[str], message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parse(*words)


@given(st.integers(0, 1 << 50), st.sampled_from(["", "B"]))
def test_plain_sizes(count: int, unit: str) -> None:
    assert size(f"{count}{unit}") == count


@given(st.integers(0, 1 << 20), st.sampled_from("KMGT"), st.sampled_from(["", "B", "iB"]))
def test_sizes_are_powers_of_1024(count: int, prefix: str, unit: str) -> None:
    expected = count * 1024 ** (1 + "KMGT".index(prefix))
    assert size(f"{count}{prefix}{unit}") == expected
    assert size(f"{count} {prefix.lower()}{unit}") == expected
