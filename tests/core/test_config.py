import pytest

from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "cuda"),
        ("weights", "int3"),
        ("kv", "fp8"),
        ("isa", "sse"),
        ("threads", -1),
        ("block_size", 5),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", "many"),
        ("kv_cache_bytes", 0),
        ("kv_memory_fraction", 1.0),
        ("max_model_len", 0),
        ("prefix_cache", "yes"),
        ("order", "lifo"),
        ("index", "tree"),
        ("seed", 2**64),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_mapping({name: value})


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'max_num_seq'.*'max_num_seqs'"):
        EngineConfig.from_mapping({"max_num_seq": 3})


def test_the_options_stay_few() -> None:
    assert len(EngineConfig.__dataclass_fields__) <= 30
