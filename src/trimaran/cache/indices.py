"""The prefix indices there are, by name."""

from __future__ import annotations

from trimaran.cache.hash_index import HashIndex
from trimaran.cache.prefix_index import PrefixIndex
from trimaran.cache.radix_index import RadixIndex
from trimaran.core.errors import ConfigError


def make_index(name: str, block_size: int) -> PrefixIndex:
    """The index of that name (`EngineConfig.index`) for blocks of `block_size` tokens.

    Raises:
        ConfigError: there is none.
    """
    if name == "hash":
        return HashIndex(block_size)
    if name == "radix":
        return RadixIndex(block_size)
    raise ConfigError(f"index is '{name}'; give 'hash' or 'radix'")
