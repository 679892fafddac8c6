"""Presets, what wins over them, and options that don't go together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trimaran.core.compatibility import CONFLICTS
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError
from trimaran.core.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_the_table_says(name: str) -> None:
    config = EngineConfig(preset=name)
    assert {option: getattr(config, option) for option in PRESETS[name]} == PRESETS[name]
    plain = EngineConfig()
    others = {field.name for field in dataclasses.fields(EngineConfig)} - {*PRESETS[name], "preset"}
    assert all(getattr(config, option) == getattr(plain, option) for option in others)
    assert EngineConfig.from_mapping({"preset": name}) == config


def test_each_preset_names_every_policy() -> None:
    named = {frozenset(options) for options in PRESETS.values()}
    assert named == {
        frozenset({"order", "chunking", "capacity", "index", "block_size", "prefix_cache"})
    }
    assert len({tuple(sorted(options.items())) for options in PRESETS.values()}) == len(PRESETS)


def test_what_is_given_wins_even_where_it_is_the_default() -> None:
    config = EngineConfig(preset="trtllm", capacity="max-utilization", block_size=16)
    assert (config.capacity, config.block_size, config.index) == ("max-utilization", 16, "radix")
    changed = dataclasses.replace(config, order="priority")
    assert (changed.order, changed.capacity) == ("priority", "max-utilization")


def test_the_default_is_like_vllm() -> None:
    assert dataclasses.replace(EngineConfig(preset="vllm"), preset=None) == EngineConfig()


@pytest.mark.parametrize("bad", ["vlm", 7, ""])
def test_an_unknown_preset_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="preset is .*vllm, sglang, trtllm, fastertransformer"):
        EngineConfig(preset=bad)
    if bad == "vlm":
        with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
            EngineConfig(preset=bad)


BAD = [
    {"order": "longest-prefix", "prefix_cache": False},
    {"index": "radix", "prefix_cache": False},
    {"chunking": "fine", "chunk_size": 64},
    {"order": "longest-prefix", "chunking": "static"},
    {"kv_host_bytes": 1 << 20, "prefix_cache": False},
    {"kv_disk_path": "blocks", "prefix_cache": False},
    {"kv_events": "tcp://*:5557", "prefix_cache": False},
]


@pytest.mark.parametrize("options", BAD)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**options)
    assert all(f"{name} is {value!r}" in str(raised.value) for name, value in options.items())
    for name in options:
        EngineConfig(**{other: value for other, value in options.items() if other != name} | (
            {"chunking": "fixed"} if name == "chunking" else {}))  # fmt: skip


def test_every_conflict_is_tested() -> None:
    assert {frozenset(options) for options in BAD} == {
        frozenset({conflict.one, conflict.other}) for conflict in CONFLICTS
    }


def test_a_conflict_with_a_preset_is_one_too() -> None:
    with pytest.raises(ConfigError, match="order is 'longest-prefix' and prefix_cache is False"):
        EngineConfig(preset="sglang", prefix_cache=False)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 2048),
        ({"chunking": "whole"}, 8192),
        ({"chunking": "static", "max_model_len": 4096}, 4096),
        ({"chunking": "whole", "max_model_len": 100}, 2048),
        ({"chunking": "fine"}, 2048),
    ],
)
def test_rows_of_a_step(options: dict[str, Any], rows: int) -> None:
    assert EngineConfig(**options).step_rows(8192) == rows
