"""Moves blocks between the pool and the tiers below it, beside the steps.

    pool ──save──▶ host memory        pool or host ──persist──▶ disk
      ◀─────────────load──────────────────┘◀─────────────────────┘

Work is done in units of one block, the most urgent first: loads, for somebody waits; saves,
for their blocks may soon be given up; then what goes to the disk. A save holds nothing. It
copies what may be given up at any time, and asks before and after whether it was (see
`StoredBlocks`): so saving never takes memory from sequences. A block that is given up before
its turn is copied then and there (`rescue`), which takes a hundredth of the time that it took
to compute what it is given up for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trimaran.cache.content import StoredBlock, StoredBlocks
from trimaran.cache.disk_store import DiskStore
from trimaran.cache.host_store import HostStore
from trimaran.core.clock import Clock

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("trimaran")

MAX_QUEUED = 4096
"""Blocks that wait to be saved, and to be persisted; what comes beyond is not taken."""

_PAUSE_SECONDS = (1.0, 60.0)  # without writing, after an error: doubled each time, up to


class BlockMemory(Protocol):
    """Blocks of the pool as bytes; a back end (`compute/backend.py`)."""

    def read_blocks(self, blocks: npt.NDArray[np.int32], out: Bytes) -> None: ...

    def write_blocks(self, blocks: npt.NDArray[np.int32], data: Bytes) -> None: ...


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way up.

    Attributes:
        digests: what is wanted, in order.
        blocks: where to; nobody else uses them until the load is done.
        loaded: how many are there, from the first on.
        cancelled: nobody waits any more; it ends with the block it is at.
        started: seconds on the clock.
    """

    digests: Sequence[bytes]
    blocks: Sequence[int]
    loaded: int = 0
    cancelled: bool = False
    started: float | None = None


class Rate:
    """Bytes a second, as measured lately: a mean whose weights halve every few blocks."""

    def __init__(self, guess: float) -> None:
        self._seconds = 1.0 / guess  # a byte
        self.measured = False

    def note(self, nbytes: int, seconds: float) -> None:
        share = 0.1 if self.measured else 1.0
        self._seconds += share * (max(seconds, 1e-9) / nbytes - self._seconds)
        self.measured = True

    def seconds(self, nbytes: int) -> float:
        return nbytes * self._seconds


@dataclass(slots=True)
class WorkCounts:
    """Blocks since the start, by what became of them.

    Attributes:
        saved, persisted, loaded: copied to host memory, written to the disk, brought back.
        rescued: copied to host memory at the moment they were given up.
        dropped: not saved: the queue was full, or they were given up first.
        failed: not persisted because of an error, or not loaded because it wasn't there or
            wasn't sound.
    """

    saved: int = 0
    rescued: int = 0
    persisted: int = 0
    loaded: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class _Queues:
    loads: deque[Load] = field(default_factory=deque)
    saves: deque[StoredBlock] = field(default_factory=deque)
    persists: deque[StoredBlock] = field(default_factory=deque)
    touches: deque[StoredBlock] = field(default_factory=deque)


class TierWork:
    """Queues of units, and `run_one` that does the next; safe across threads.

    One thread at a time calls `run_one`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        block_bytes: int,
        stored: StoredBlocks,
        clock: Clock,
        host: HostStore | None,
        disk: DiskStore | None,
    ) -> None:
        self.block_bytes = block_bytes
        self.host = host
        self.disk = disk
        self.counts = WorkCounts()
        self.copying = Rate(4e9)
        self.reading = Rate(5e8)
        self.done: Callable[[], None] = lambda: None  # called when a load has ended
        self._memory = memory
        self._stored = stored
        self._clock = clock
        self._queues = _Queues()
        self._pending: set[bytes] = set()  # to be saved
        self._finished: deque[Load] = deque()
        self._news = threading.Condition()
        self._failures = 0
        self._paused_until: float | None = None
        self._stopping = False

    # ------------------------------------------------------------------ asking

    def save(self, blocks: Sequence[StoredBlock], urgent: bool = False) -> None:
        """Blocks to be copied to host memory, those that are there left out. Urgent ones come
        before all others, the last of them first."""
        host = self.host
        if host is None:
            return
        with self._news:
            queue = self._queues.saves
            for stored in blocks:
                if stored.digest in host or (not urgent and stored.digest in self._pending):
                    continue
                if len(queue) >= MAX_QUEUED:
                    self.counts.dropped += 1
                    if not urgent:
                        continue
                    self._pending.discard(queue.pop().digest)
                self._pending.add(stored.digest)
                if urgent:
                    queue.appendleft(stored)
                else:
                    queue.append(stored)
            self._news.notify()

    def rescue(self, stored: StoredBlock) -> None:
        """Copies a block at once that is being given up and still waits to be saved. To be
        called where nobody writes to it yet, and no step is at work."""
        host = self.host
        if host is None or stored.digest not in self._pending or stored.digest in host:
            return
        data = np.empty((1, self.block_bytes), np.uint8)
        try:
            self._memory.read_blocks(np.array([stored.block], np.int32), data)
        except Exception as error:
            log.warning("a KV block couldn't be copied: %s", error)
            return
        if host.put(stored.digest, data[0]):
            self.counts.rescued += 1

    def persist(self, blocks: Sequence[StoredBlock]) -> None:
        """Blocks to be written to the disk; those that were asked for already are left out."""
        if self.disk is None:
            return
        with self._news:
            queue = self._queues.persists
            for stored in blocks:
                if not stored.persisted and len(queue) < MAX_QUEUED:
                    stored.persisted = True
                    queue.append(stored)
            self._news.notify()

    def touch(self, blocks: Sequence[StoredBlock]) -> None:
        """Blocks on the disk that were used in the pool."""
        with self._news:
            if len(self._queues.touches) < MAX_QUEUED:
                self._queues.touches.extend(blocks)
            self._news.notify()

    def load(self, load: Load) -> None:
        """Starts a load; it comes out of `take_finished` when it has ended."""
        with self._news:
            self._queues.loads.append(load)
            self._news.notify()

    def take_finished(self) -> list[Load]:
        """Loads that have ended since the last call."""
        finished: list[Load] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def backlog(self) -> int:
        """Blocks that loads before a new one have still to bring."""
        with self._news:
            return sum(len(load.blocks) - load.loaded for load in self._queues.loads)

    # ------------------------------------------------------------------ doing

    def wait(self, seconds: float) -> None:
        """Returns when there is work, and at the latest after so many seconds."""
        with self._news:
            self._news.wait_for(self._any, seconds)

    def run_one(self) -> bool:
        """Does the most urgent unit; False where there is none. Never raises."""
        unit = self._next()
        if unit is None:
            return False
        unit()
        return True

    def _next(self) -> Callable[[], None] | None:
        with self._news:
            queues = self._queues
            if queues.loads:
                return partial(self._bring, queues.loads[0])
            for queue, do in (
                (queues.saves, self._save),
                (queues.touches, self._touch),
                (queues.persists, self._persist),
            ):
                if queue:
                    return partial(do, queue.popleft())
        return None

    def stop(self) -> None:
        """From now on `wait` returns at once."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def end(self) -> None:
        """Ends all loads as they are, and forgets what else was asked for."""
        with self._news:
            self._finished.extend(self._queues.loads)
            self._queues = _Queues()
            self._pending.clear()

    def _any(self) -> bool:
        queues = self._queues
        waits = queues.loads or queues.saves or queues.persists or queues.touches
        return bool(waits) or self._stopping

    def _bring(self, load: Load) -> None:
        """The next block of the first load."""
        ended = load.cancelled or load.loaded == len(load.blocks)
        if not ended:
            if load.started is None:
                load.started = self._clock.now()
            ended = not self._bring_block(load.digests[load.loaded], load.blocks[load.loaded])
            load.loaded += not ended
            ended = ended or load.loaded == len(load.blocks)
        if ended:
            with self._news:
                self._queues.loads.popleft()
            self._finished.append(load)
            self.done()

    def _bring_block(self, digest: bytes, block: int) -> bool:
        try:
            data = self._find(digest)
            if data is None:
                self.counts.failed += 1
                return False
            begin = self._clock.now()
            self._memory.write_blocks(np.array([block], np.int32), data[None])
            self.copying.note(data.nbytes, self._clock.now() - begin)
        except Exception as error:
            log.warning("a KV block couldn't be loaded: %s", error)
            self.counts.failed += 1
            return False
        self.counts.loaded += 1
        return True

    def _find(self, digest: bytes) -> Bytes | None:
        data = self.host.get(digest) if self.host is not None else None
        if data is None and self.disk is not None:
            begin = self._clock.now()
            data = self.disk.read(digest)
            if data is not None:
                self.reading.note(data.nbytes, self._clock.now() - begin)
                if self.host is not None:
                    self.host.put(digest, data)
        return data

    def _copy(self, stored: StoredBlock) -> Bytes | None:
        """A copy of a block's bytes; None where the block was given up meanwhile."""
        if self._stored.at(stored.block) is not stored:
            return None
        data = np.empty((1, self.block_bytes), np.uint8)
        begin = self._clock.now()
        try:
            self._memory.read_blocks(np.array([stored.block], np.int32), data)
        except Exception as error:
            log.warning("a KV block couldn't be copied: %s", error)
            return None
        if self._stored.at(stored.block) is not stored:
            return None
        self.copying.note(data.nbytes, self._clock.now() - begin)
        copied: Bytes = data[0]
        return copied

    def _save(self, stored: StoredBlock) -> None:
        host = self.host
        assert host is not None
        if stored.digest not in host:
            data = self._copy(stored)
            if data is not None and host.put(stored.digest, data):
                self.counts.saved += 1
            elif stored.digest not in host:
                self.counts.dropped += 1
        self._pending.discard(stored.digest)

    def _touch(self, stored: StoredBlock) -> None:
        stored.persisted = self.disk is not None and self.disk.touch(stored.digest)

    def _persist(self, stored: StoredBlock) -> None:
        assert self.disk is not None
        if self._paused_until is not None and self._clock.now() < self._paused_until:
            stored.persisted = False
            self.counts.failed += 1
            return
        data = self.host.get(stored.digest) if self.host is not None else None
        if data is None:
            data = self._copy(stored)
        if data is None:
            stored.persisted = False
            self.counts.dropped += 1
            return
        try:
            self.disk.write(stored.digest, data)
        except OSError as error:
            stored.persisted = False
            self.counts.failed += 1
            first, most = _PAUSE_SECONDS
            pause = min(most, first * 2**self._failures)
            self._failures += 1
            self._paused_until = self._clock.now() + pause
            log.warning(
                "KV blocks can't be written to kv_disk_path for now, the next try is in %g s: %s",
                pause,
                error,
            )
            return
        self._failures = 0
        self.counts.persisted += 1


class TierThread:
    """Does a `TierWork`'s work on a thread of its own, until it is closed."""

    def __init__(self, work: TierWork, clock: Clock) -> None:
        self._work = work
        self._clock = clock
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="trimaran-kv-tiers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            closing_at = self._closing_at
            if closing_at is not None and self._clock.now() >= closing_at:
                return
            if not self._work.run_one():
                if closing_at is not None:
                    return
                self._work.wait(1.0)

    def close(self, seconds: float = 2.0) -> None:
        """Stops it; what is still queued is done first, for so many seconds at most."""
        self._closing_at = self._clock.now() + seconds
        self._work.stop()
        self._thread.join()
        self._work.end()
