"""Transfers beside the steps: what is copied is what was stored, or nothing is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from trimaran.cache.content import ContentHash, StoredBlocks
from trimaran.cache.disk_store import DiskStore
from trimaran.cache.host_store import HostStore
from trimaran.cache.tier_work import MAX_QUEUED, Load, TierThread, TierWork
from trimaran.core.clock import SystemClock, VirtualClock
from trimaran.core.namespace import Namespace

SIZE = 64


class Memory:
    """Blocks of one repeated byte; may be slow, and may fail."""

    def __init__(self, blocks: int = 8) -> None:
        self.data = np.arange(blocks, dtype=np.uint8)[:, None].repeat(SIZE, 1)
        self.during = lambda: None
        self.error: Exception | None = None

    def read_blocks(self, blocks: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.data[blocks]
        self.during()
        if self.error:
            raise self.error

    def write_blocks(self, blocks: np.ndarray, data: np.ndarray) -> None:
        self.during()
        if self.error:
            raise self.error
        self.data[blocks] = data


@pytest.fixture
def parts() -> tuple[Memory, StoredBlocks, TierWork]:
    memory, stored = Memory(), StoredBlocks(2, ContentHash())
    return (
        memory,
        stored,
        TierWork(memory, SIZE, stored, VirtualClock(), HostStore(100 * SIZE), None),
    )


Parts = tuple[Memory, StoredBlocks, TierWork]


def store(stored: StoredBlocks, block: int, before: int | None = None):  # type: ignore[no-untyped-def]
    stored.add(block, before, [block, block], Namespace())
    return stored.at(block)


def test_a_block_that_is_given_up_before_or_while_it_is_copied_is_not_kept(parts: Parts) -> None:
    memory, stored, work = parts
    first, second = store(stored, 1), store(stored, 2)
    work.save([first, second])
    stored.remove(1)
    memory.during = lambda: stored.remove(2)
    while work.run_one():
        pass
    assert work.host is not None and len(work.host) == 0 and work.counts.dropped == 2


def test_a_block_stored_anew_while_it_is_copied_is_another(parts: Parts) -> None:
    memory, stored, work = parts
    first = store(stored, 1)
    work.save([first])

    def replace() -> None:
        stored.remove(1)
        assert store(stored, 1).digest == first.digest

    memory.during = replace
    work.run_one()
    assert work.host is not None and len(work.host) == 0


def test_the_queue_is_bounded(parts: Parts) -> None:
    _, stored, work = parts
    blocks = [store(stored, number) for number in range(MAX_QUEUED + 10)]
    work.save(blocks)
    assert work.counts.dropped == 10


def test_urgent_blocks_come_first_and_the_last_of_them_before_all(parts: Parts) -> None:
    _, stored, work = parts
    blocks = [store(stored, number) for number in range(6)]
    work.save(blocks[:3])
    work.save(blocks[3:], urgent=True)
    order: list[bytes] = []
    assert work.host is not None
    put = work.host.put
    work.host.put = lambda digest, data: order.append(digest) or put(digest, data)  # type: ignore[method-assign, func-returns-value]
    while work.run_one():
        pass
    assert order == [blocks[number].digest for number in (5, 4, 3, 0, 1, 2)]


def test_an_error_of_the_back_end_ends_the_load_where_it_is(parts: Parts) -> None:
    memory, stored, work = parts
    blocks = [store(stored, number) for number in range(3)]
    work.save(blocks)
    while work.run_one():
        pass
    load = Load([b.digest for b in blocks], [5, 6, 7])
    work.load(load)
    work.run_one()
    memory.error = RuntimeError("broken")
    while work.run_one():
        pass
    assert work.take_finished() == [load] and load.loaded == 1
    assert (memory.data[5] == 0).all() and (memory.data[6] == 6).all()
    work.save([store(stored, 7)])
    assert work.run_one() and not work.run_one()  # and the work goes on


def test_the_thread_does_what_is_queued_before_it_ends(tmp_path: Path) -> None:
    memory, stored, clock = Memory(200), StoredBlocks(2, ContentHash()), SystemClock()
    disk = DiskStore(tmp_path, 1 << 20, SIZE)
    disk.open(b"k" * 32)
    work = TierWork(memory, SIZE, stored, clock, None, disk)
    done = threading.Event()
    work.done = done.set
    thread = TierThread(work, clock)
    blocks = [store(stored, number) for number in range(100)]
    work.persist(blocks)
    begin = time.monotonic()
    thread.close(20.0)
    assert time.monotonic() - begin < 10
    assert work.counts.persisted == 100 and all(disk.has(b.digest) for b in blocks)
    again = TierThread(work, clock)
    load = Load([b.digest for b in blocks[:50]], range(100, 150))
    work.load(load)
    assert done.wait(10)
    assert work.take_finished() == [load] and load.loaded == 50
    assert (memory.data[100:150] == memory.data[:50]).all()
    again.close()


def test_closing_doesn_t_wait_for_more_than_it_may(tmp_path: Path) -> None:
    memory, stored, clock = Memory(200), StoredBlocks(2, ContentHash()), SystemClock()
    disk = DiskStore(tmp_path, 1 << 20, SIZE)
    disk.open(b"k" * 32)
    work = TierWork(memory, SIZE, stored, clock, None, disk)
    memory.during = lambda: time.sleep(0.05)
    thread = TierThread(work, clock)
    work.persist([store(stored, number) for number in range(100)])
    load = Load([b"?" * 32], [3])
    begin = time.monotonic()
    thread.close(0.2)
    assert time.monotonic() - begin < 3
    work.load(load)
    work.end()
    assert work.take_finished() == [load]
