"""Puts the KV cache together with its lower tiers and its events, as configured."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.cache.content import ContentHash, StoredBlocks
from trimaran.cache.disk_store import KEY_BYTES, DiskStore
from trimaran.cache.host_store import HostStore
from trimaran.cache.indices import make_index
from trimaran.cache.manager import KVCacheManager
from trimaran.cache.prefix_index import NoIndex
from trimaran.cache.tier_work import TierThread, TierWork
from trimaran.cache.tiers import KVTiers
from trimaran.compute.backend import Backend
from trimaran.core.clock import Clock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ConfigError
from trimaran.engine.core import EngineCore, Service

log = logging.getLogger("trimaran")


@dataclass(slots=True)
class CacheParts:
    """A cache, and what runs beside it."""

    kv: KVCacheManager
    tiers: KVTiers | None = None
    work: TierWork | None = None
    services: list[Service] = field(default_factory=list)

    def attach(self, core: EngineCore) -> None:
        """The core closes the services, and is woken when a load has ended."""
        core.services += self.services
        if self.work is not None:
            self.work.done = lambda: core.wake()


def make_cache(
    config: EngineConfig, blocks: int, content: StoredBlocks | None = None
) -> KVCacheManager:
    """The bookkeeping of a cache of `blocks` blocks, with the index asked for."""
    size = config.block_size
    index = make_index(config.index, size) if config.prefix_cache else NoIndex()
    return KVCacheManager(blocks, size, index=index, content=content)


def open_tiers(backend: Backend, config: EngineConfig, num_blocks: int, clock: Clock) -> CacheParts:
    """The cache over a back end that has allocated its blocks.

    Raises:
        ConfigError: a tier or the events can't be had as configured; names the option.
    """
    if not (config.kv_host_bytes or config.kv_disk_path or config.kv_events):
        return CacheParts(make_cache(config, num_blocks))
    block_bytes = backend.kv_block_bytes()
    host = _open_host(config, block_bytes)
    disk, content = _open_disk(config, backend, block_bytes)
    stored = StoredBlocks(config.block_size, content)
    kv = make_cache(config, num_blocks, stored)
    parts = CacheParts(kv)
    if config.kv_events:
        from trimaran.engine.kv_events import open_publisher

        publisher = open_publisher(config.kv_events, config.block_size)
        stored.observers.append(publisher)
        parts.services.append(publisher)
    if host is not None or disk is not None:
        parts.work = TierWork(backend, block_bytes, stored, clock, host, disk)
        parts.tiers = KVTiers(kv, parts.work)
        parts.services.append(TierThread(parts.work, clock))
    return parts


def _open_host(config: EngineConfig, block_bytes: int) -> HostStore | None:
    if config.kv_host_bytes == 0:
        return None
    if config.kv_host_bytes < block_bytes:
        raise ConfigError(
            f"kv_host_bytes is {config.kv_host_bytes}, less than one KV block of {block_bytes}"
            " bytes; raise it, or leave it out"
        )
    return HostStore(config.kv_host_bytes)


def _open_disk(
    config: EngineConfig, backend: Backend, block_bytes: int
) -> tuple[DiskStore | None, ContentHash]:
    if config.kv_disk_path is None:
        return None, ContentHash()
    path = Path(config.kv_disk_path).expanduser()
    disk = DiskStore(path, config.kv_disk_bytes, block_bytes)
    if disk.file_bytes > config.kv_disk_bytes:
        raise ConfigError(
            f"kv_disk_bytes is {config.kv_disk_bytes}, less than one KV block of"
            f" {disk.file_bytes} bytes; raise it, or leave kv_disk_path out"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        key = disk.open(secrets.token_bytes(KEY_BYTES))
    except OSError as error:
        raise ConfigError(
            f"kv_disk_path '{config.kv_disk_path}' can't be used: {error.strerror or error}; give"
            " a folder that can be written to"
        ) from None
    log.info("KV blocks are kept in %s, %d bytes at most", disk.folder, config.kv_disk_bytes)
    return disk, ContentHash(backend.kv_fingerprint(), key)
