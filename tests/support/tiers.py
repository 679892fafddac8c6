"""A fake engine over a cache with tiers, whose transfers run when the test says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.scheduling import FakeBackend, FakeEngine

from trimaran.cache.content import ContentHash, StoredBlocks
from trimaran.cache.disk_store import KEY_BYTES, DiskStore
from trimaran.cache.host_store import HostStore
from trimaran.cache.indices import make_index
from trimaran.cache.manager import KVCacheManager
from trimaran.cache.tier_work import TierWork
from trimaran.cache.tiers import KVTiers
from trimaran.core.clock import VirtualClock
from trimaran.core.config import EngineConfig
from trimaran.schedule.capacity import Capacity

SLOT_BYTES = 32


class TieredEngine(FakeEngine):
    """Attributes: work, disk, host; `settle` lets all transfers end."""

    work: TierWork
    disk: DiskStore | None
    host: HostStore | None

    def transfers(self, count: int = 10_000) -> int:
        """Runs so many units of transfer, or all; how many there were."""
        return next((n for n in range(count) if not self.work.run_one()), count)

    def drain_all(self, limit: int = 10_000) -> None:
        """Steps and transfers until there is no work."""
        for _ in range(limit):
            if self.step() is None:
                self.transfers()
                assert self.scheduler.loading is not None
                if not self.scheduler.has_work() and not self.scheduler.loading.tiers.loading:
                    return
        raise AssertionError("no end in sight")


def make_tiered(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    host_blocks: int = 0,
    disk_path: Path | None = None,
    disk_blocks: int = 1000,
    index: str = "hash",
    capacity: Capacity | str | None = None,
    max_num_seqs: int = 8,
    budget: int = 64,
    **options: Any,
) -> TieredEngine:
    """An engine over a new cache; its tiers hold so many blocks."""
    size = block_size * SLOT_BYTES
    host = HostStore(host_blocks * size) if host_blocks else None
    disk, key = None, b""
    if disk_path is not None:
        disk = DiskStore(disk_path, disk_blocks * (size + 48), size)
        key = disk.open(b"k" * KEY_BYTES)
    stored = StoredBlocks(block_size, ContentHash(b"fake", key))
    made = make_index(index, block_size)
    kv = KVCacheManager(num_blocks, block_size, index=made, content=stored)
    works: list[TierWork] = []

    def tiers(backend: FakeBackend, clock: VirtualClock) -> KVTiers:
        works.append(TierWork(backend, size, stored, clock, host, disk))
        return KVTiers(kv, works[0])

    if isinstance(capacity, str):
        options["capacity"], capacity = capacity, None
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **options)
    engine = TieredEngine(config, kv, None, capacity, tiers)
    engine.work, engine.disk, engine.host = works[0], disk, host
    return engine
