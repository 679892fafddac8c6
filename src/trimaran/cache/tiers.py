"""The tiers below the pool: what is kept there, and what can be had from there.

    pool          blocks that steps compute with (device memory; main memory on a CPU)
    host memory   `kv_host_bytes`: every full block, as soon as it was computed
    disk          `kv_disk_bytes` at `kv_disk_path`: blocks that were used twice

Writing. Host memory gets a copy of each block when it is stored (write-through): a copy costs
a hundredth of what computing the block cost, and what the pool gives up later is mostly there
already; the rest is copied as it is given up. The disk gets a block at its second use
(`PERSIST_USES`): most prompts come once, and what comes again is what a restarted engine will
be asked for. What is on the disk and used in the pool is noted there at every eighth use, so
that it doesn't grow old. A block that the pool gives up before it was written, with no host
memory to wait in, is written at its next second use.

Reading. A prefix that the pool's index finds may go on in a lower tier; then those blocks are
loaded and indexed as if they had been computed (`KVCacheManager.reserve`, `settle`), and who
asked finds them like any other prefix. A block that isn't there any more, or isn't sound, ends
the load: the rest is computed.

Conservation: a block that is being loaded is held by its load. Copies in lower tiers are no
blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.cache.content import StoredBlock
from trimaran.cache.manager import KVCacheManager, Reserved
from trimaran.cache.prefix_index import Match
from trimaran.cache.tier_work import Load, TierWork

PERSIST_USES = 2
"""A block goes to the disk at this use: its computation is the first."""

TOUCH_USES = 8
"""A block on the disk that is used in the pool is noted there each time after so many."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What the tiers hold, and blocks since the start by what became of them.

    Attributes:
        host_bytes, disk_bytes: in use; of the disk, by all processes.
        saved, rescued, persisted, loaded, dropped, failed: as in `WorkCounts`.
    """

    host_bytes: int
    disk_bytes: int
    saved: int
    rescued: int
    persisted: int
    loaded: int
    dropped: int
    failed: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """What lower tiers have of a sequence after the prefix that the pool has.

    Attributes:
        digests: of full blocks, in order.
        seconds: that loading them will take, as measured.
        under_way: a load that is bringing what comes next already; then `digests` is empty.
    """

    digests: list[bytes]
    seconds: float
    under_way: Load | None = None


class KVTiers:
    """Host memory, disk or both below one cache; every method on the engine's thread."""

    def __init__(self, kv: KVCacheManager, work: TierWork) -> None:
        """
        Args:
            kv: made with a `StoredBlocks`, of which this becomes an observer.
        """
        assert kv.content is not None
        self._kv = kv
        self._content = kv.content
        self._work = work
        self._loads: dict[Load, tuple[Reserved, list[int]]] = {}
        self._coming: dict[bytes, Load] = {}
        self._unstarted: list[Load] = []
        kv.content.observers.append(self)

    # ------------------------------------------------------------------ down

    def stored(self, stored: StoredBlock) -> None:
        self._work.save([stored])

    def used(self, found: Sequence[StoredBlock]) -> None:
        work = self._work
        work.save(found)
        if work.disk is not None:
            work.persist([stored for stored in found if stored.uses >= PERSIST_USES])
            old = [s for s in found if s.persisted and s.uses % TOUCH_USES == 0]
            if old:
                work.touch(old)

    def removed(self, stored: StoredBlock) -> None:
        self._work.rescue(stored)

    def cleared(self) -> None:
        """Lower tiers keep what they have: it is as true as before."""

    def move_seconds(self, blocks: Sequence[int]) -> float | None:
        """Seconds to copy what isn't there yet of some blocks to host memory and to bring all
        of them back; None where they can't be moved."""
        host, size = self._work.host, self._work.block_bytes
        if host is None or len(blocks) * size > host.max_bytes:
            return None
        found = [self._content.at(block) for block in blocks]
        if not all(found):
            return None
        missing = sum(stored is not None and stored.digest not in host for stored in found)
        return self._work.copying.seconds((missing + len(blocks)) * size)

    def move(self, blocks: Sequence[int]) -> None:
        """Copies blocks to host memory before all others, the last one first, as the pool
        will give them up."""
        found = (self._content.at(block) for block in blocks)
        self._work.save([stored for stored in found if stored is not None], urgent=True)

    # ------------------------------------------------------------------ up

    def find(self, match: Match, tokens: Sequence[int], limit: int) -> Continuation:
        """What continues a match of full blocks within the first `limit` blocks of a
        sequence. Costs a hash and a look-up a block: of the disk, one look at the folder."""
        work, content = self._work, self._content
        start, size = len(match.blocks), content.block_size
        last = content.at(match.blocks[-1]) if match.blocks else None
        if match.blocks and last is None:
            return Continuation([], 0.0)
        before = last.digest if last is not None else content.content.root(match.cursor.namespace)
        digests: list[bytes] = []
        seconds = 0.0
        for digest in content.content.chain(before, tokens, start, limit, size):
            if not digests and digest in self._coming:
                load = self._coming[digest]
                return Continuation([], 0.0, None if load.cancelled else load)
            if work.host is not None and digest in work.host:
                seconds += work.copying.seconds(work.block_bytes)
            elif work.disk is not None and work.disk.has(digest):
                seconds += work.copying.seconds(work.block_bytes)
                seconds += work.reading.seconds(work.block_bytes)
            else:
                break
            digests.append(digest)
        if digests:
            seconds += work.copying.seconds(work.backlog() * work.block_bytes)
        return Continuation(digests, seconds)

    def load(self, match: Match, tokens: Sequence[int], digests: Sequence[bytes]) -> Load | None:
        """Takes room for blocks that continue a match, to be brought from `start` on; None
        where the pool has none.

        Args:
            tokens: of the sequence, from its beginning.
        """
        reserved = self._kv.reserve(match, len(digests))
        if reserved is None:
            return None
        load = Load(list(digests), reserved.blocks[reserved.start :])
        size = self._content.block_size
        self._loads[load] = reserved, list(tokens[: len(reserved.blocks) * size])
        for digest in digests:
            self._coming[digest] = load
        self._unstarted.append(load)
        return load

    def start(self) -> None:
        """Brings what `load` was called for. Not to be called between the making of a step
        and its end: the blocks may have been given up in the same moment, and the step may
        have to copy from them first (`KVCacheManager.take_copies`)."""
        for load in self._unstarted:
            self._work.load(load)
        self._unstarted.clear()

    def take_finished(self) -> list[Load]:
        """Loads that have ended since the last call; what they brought is indexed now."""
        finished = self._work.take_finished() if self._loads else []
        for load in finished:
            reserved, tokens = self._loads.pop(load)
            for digest in load.digests:
                if self._coming.get(digest) is load:
                    del self._coming[digest]
            self._kv.settle(reserved, tokens, load.loaded)
        return finished

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def usage(self) -> TierUsage:
        work, counts = self._work, self._work.counts
        return TierUsage(
            host_bytes=work.host.nbytes if work.host is not None else 0,
            disk_bytes=work.disk.nbytes if work.disk is not None else 0,
            saved=counts.saved,
            rescued=counts.rescued,
            persisted=counts.persisted,
            loaded=counts.loaded,
            dropped=counts.dropped,
            failed=counts.failed,
        )
