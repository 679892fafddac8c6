import pytest

from trimaran.core.config import EngineConfig
from trimaran.core.errors import CapacityError, ConfigError
from trimaran.engine.memory import available_bytes, plan_cache


def test_the_share_of_free_memory_bounds_the_cache() -> None:
    config = EngineConfig(kv_memory_fraction=0.5, block_size=16, max_num_seqs=64)
    plan = plan_cache(config, context=8192, bytes_per_token=1000, free=32_000_000)
    assert plan.blocks == 1000
    assert plan.max_model_len == 8192
    assert "kv_memory_fraction" in plan.reason


def test_no_more_than_all_sequences_could_use() -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=100, block_size=16)
    plan = plan_cache(config, context=8192, bytes_per_token=1000, free=1 << 40)
    assert plan.blocks == 2 * 7


def test_the_context_shrinks_to_a_small_cache_unless_it_was_asked_for() -> None:
    plan = plan_cache(EngineConfig(kv_cache_bytes=160_000), 8192, 1000, 1 << 40)
    assert plan.max_model_len == 160
    with pytest.raises(CapacityError, match="kv_cache_bytes.*max_model_len 8192|8192.*kv_cache"):
        plan_cache(EngineConfig(kv_cache_bytes=160_000, max_model_len=8192), 8192, 1000, 1 << 40)


def test_too_little_for_a_block_names_the_option() -> None:
    with pytest.raises(CapacityError, match="kv_cache_bytes"):
        plan_cache(EngineConfig(kv_cache_bytes=100), 8192, 1000, 1 << 40)


def test_a_context_longer_than_the_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 9000"):
        plan_cache(EngineConfig(max_model_len=9000), 8192, 1000, 1 << 40)


def test_available_memory_is_a_sane_number() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
