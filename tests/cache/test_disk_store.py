"""The disk tier: a shared, bounded folder in which anything may happen to the files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import in_fork

from trimaran.cache.disk_store import FOLDER, KEY_BYTES, DiskStore

SIZE = 1000
FILE = SIZE + 48


def name(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def opened(path: Path, blocks: float = 100) -> DiskStore:
    store = DiskStore(path, int(blocks * FILE), SIZE)
    store.open(os.urandom(KEY_BYTES))
    return store


def files(path: Path) -> list[Path]:
    return sorted(p for p in (path / FOLDER).glob("??/*") if p.is_file())


def age(path: Path, digest: bytes, seconds: float) -> None:
    (place,) = (path / FOLDER).glob(f"??/{digest.hex()}.kv")
    os.utime(place, (time.time() - seconds,) * 2)


def test_what_was_written_is_read_also_by_another_store(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(20):
        store.write(name(number), payload(number))
    other = DiskStore(tmp_path, 100 * FILE, SIZE)
    assert other.open(b"x" * KEY_BYTES) == store.open(b"y" * KEY_BYTES)
    for number in range(20):
        for each in (store, other):
            data = each.read(name(number))
            assert data is not None and (data == payload(number)).all()
            assert each.has(name(number))
    assert not store.has(name(20)) and store.read(name(20)) is None
    assert store.nbytes == 20 * FILE == sum(p.stat().st_size for p in files(tmp_path))


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(name(1), payload(1))
    for place in [store.folder, *store.folder.rglob("*")]:
        assert place.stat().st_mode & 0o077 == 0, place


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, FILE - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_and_the_file_removed(tmp_path: Path, at: int, bit: int) -> None:
    store = opened(tmp_path)
    store.write(name(1), payload(1))
    (place,) = files(tmp_path)
    data = bytearray(place.read_bytes())
    data[at] ^= 1 << bit
    place.write_bytes(data)
    assert store.read(name(1)) is None
    assert not place.exists() and store.nbytes == 0
    store.write(name(1), payload(1))  # and can be written anew
    assert store.read(name(1)) is not None


@pytest.mark.parametrize("content", [b"", b"x", b"x" * FILE, b"x" * (FILE + 1), b"TRMKV001"])
def test_truncated_and_foreign_files_are_ignored_and_removed(
    tmp_path: Path, content: bytes
) -> None:
    store = opened(tmp_path)
    store.write(name(1), payload(1))
    (place,) = files(tmp_path)
    place.write_bytes(content)
    assert store.has(name(1)) == (len(content) == FILE)
    assert store.read(name(1)) is None
    assert not place.exists()


def test_a_block_of_another_name_is_foreign(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(name(1), payload(1))
    (place,) = files(tmp_path)
    other = store.folder / name(2).hex()[:2] / f"{name(2).hex()}.kv"
    other.parent.mkdir(exist_ok=True)
    place.rename(other)
    assert store.read(name(2)) is None and not other.exists()


def test_files_that_aren_t_ours_are_never_touched(tmp_path: Path) -> None:
    theirs = [
        tmp_path / "thesis.tex",
        tmp_path / FOLDER / "notes",
        tmp_path / FOLDER / "ab" / "x.kv",
    ]
    store = opened(tmp_path, 2)
    for place in theirs:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"z" * 10 * FILE)
    for number in range(20):
        store.write(name(number), payload(number))
    opened(tmp_path, 2)
    assert all(place.read_bytes() == b"z" * 10 * FILE for place in theirs)


def test_the_bound_holds_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = opened(tmp_path, 10)
    for number in range(10):
        store.write(name(number), payload(number))
        age(tmp_path, name(number), 100 - number)
    assert store.read(name(0)) is not None  # used now
    assert store.touch(name(1)) and not store.touch(name(99))
    for number in range(10, 30):
        store.write(name(number), payload(number))
        assert sum(p.stat().st_size for p in files(tmp_path)) <= store.nbytes <= 10 * FILE
        if number == 11:
            assert store.has(name(0)) and store.has(name(1)) and not store.has(name(2))
    assert store.has(name(29))


def test_a_bound_below_one_block_takes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, 0.9)
    with pytest.raises(OSError, match="kv_disk_bytes"):
        store.write(name(1), payload(1))
    assert not files(tmp_path) and store.nbytes == 0


def test_a_smaller_bound_at_the_next_start_is_kept(tmp_path: Path) -> None:
    store = opened(tmp_path, 50)
    for number in range(50):
        store.write(name(number), payload(number))
    assert opened(tmp_path, 10).nbytes <= 10 * FILE
    assert len(files(tmp_path)) <= 10


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill() -> str:
        store = opened(tmp_path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE // 2, resource.RLIM_INFINITY))
        try:
            store.write(name(1), payload(1))
        except OSError as error:
            return f"{type(error).__name__} {store.nbytes} {len(files(tmp_path))}"
        return "written"

    assert in_fork(fill) == "OSError 0 0"


def test_a_write_that_fails_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    real = os.writev
    calls = []

    def half(number: int, parts: list[memoryview]) -> int:
        calls.append(number)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(number, [parts[0][:20]])

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(OSError, match="No space"):
        store.write(name(1), payload(1))
    assert store.nbytes == 0 and not files(tmp_path)
    monkeypatch.setattr(os, "writev", lambda number, parts: real(number, [parts[0][:37]]))
    store.write(name(1), payload(1))  # in many small pieces
    assert (store.read(name(1)) == payload(1)).all()  # type: ignore[union-attr]


WRITER = """
import os, sys
sys.path[:0] = {paths!r}
import numpy as np
from pathlib import Path
from trimaran.cache.disk_store import DiskStore
store = DiskStore(Path({path!r}), {bound}, {size})
store.open(os.urandom(32))
print("ready", flush=True)
for number in range({first}, {last}):
    digest = number.to_bytes(4, "big") * 8
    written = np.random.default_rng(number).integers(0, 256, {size}, dtype=np.uint8)
    store.write(digest, written)
    data = store.read(digest)
    assert data is None or (data == written).all()
"""


def writer(
    path: Path, first: int, last: int, blocks: int, size: int = SIZE
) -> subprocess.Popen[str]:
    code = WRITER.format(
        paths=sys.path,
        path=str(path),
        bound=blocks * (size + 48),
        size=size,
        first=first,
        last=last,
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_several_processes_share_one_bound(tmp_path: Path) -> None:
    writers = [writer(tmp_path, 1000 * i, 1000 * i + 150, 40) for i in range(3)]
    most = 0
    while any(w.poll() is None for w in writers):
        sizes = 0
        for place in files(tmp_path):
            try:
                sizes += place.stat().st_size
            except FileNotFoundError:
                continue
        most = max(most, sizes)
    assert [w.returncode for w in writers] == [0, 0, 0]
    # A look at the files isn't one moment: what is renamed or replaced may be seen twice.
    assert 0 < most <= 44 * FILE
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 40 * FILE
    store = opened(tmp_path, 40)
    for place in files(tmp_path):
        digest = bytes.fromhex(place.stem)
        assert (store.read(digest) == payload(int.from_bytes(digest[:4], "big"))).all()  # type: ignore[union-attr]


def test_writers_that_are_killed_leave_sound_blocks_and_no_parts(tmp_path: Path) -> None:
    size = 16 << 20
    parts: list[Path] = []
    for attempt in range(30):  # until one is killed in the middle of writing
        process = writer(tmp_path, 100 * attempt, 100 * attempt + 99, 50, size)
        end = time.monotonic() + 10
        while not [p for p in files(tmp_path) if p.suffix == ".part"]:
            assert time.monotonic() < end
        process.send_signal(signal.SIGKILL)
        process.wait()
        parts = [p for p in files(tmp_path) if p.suffix == ".part"]
        if parts and attempt > 2:
            break
    blocks = [p for p in files(tmp_path) if p.suffix == ".kv"]
    assert parts
    store = DiskStore(tmp_path, 50 * (size + 48), size)
    store.open(b"k" * KEY_BYTES)
    assert sorted(blocks) == files(tmp_path)  # the parts are gone
    assert store.nbytes == len(blocks) * (size + 48)
    for place in blocks:
        digest = bytes.fromhex(place.stem)
        number = int.from_bytes(digest[:4], "big")
        wanted = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
        assert (store.read(digest) == wanted).all()  # type: ignore[union-attr]


def test_a_part_that_is_being_written_stays(tmp_path: Path) -> None:
    size = 4 << 20
    process = writer(tmp_path, 0, 10_000, 20, size)
    try:
        for _ in range(10):
            store = DiskStore(tmp_path, 20 * (size + 48), size)
            store.open(b"k" * KEY_BYTES)
            time.sleep(0.02)
            assert process.poll() is None, "the writer lost its file"
    finally:
        process.kill()
        process.wait()
