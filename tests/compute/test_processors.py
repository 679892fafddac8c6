"""Processors that may be used, on file systems made up for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.compute.processors import cpu_quota, usable_processors

V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 31 0:28 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def v2(root: Path, group: str, limits: dict[str, str], mount: str = V2_MOUNT) -> Path:
    files = {"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": mount}
    return write(root, files | {f"sys/fs/cgroup{at}/cpu.max": text for at, text in limits.items()})


def v1(root: Path, group: str, quotas: dict[str, int], mount: str = V1_MOUNT) -> Path:
    files = {
        "proc/self/cgroup": f"9:name=systemd:/\n4:memory:/m\n1:cpu,cpuacct:{group}\n0::/elsewhere",
        "proc/self/mountinfo": mount + "\n" + V2_MOUNT.replace("/cgroup ", "/cgroup/unified "),
    }
    for at, quota in quotas.items():
        files[f"sys/fs/cgroup/cpu{at}/cpu.cfs_quota_us"] = str(quota)
        files[f"sys/fs/cgroup/cpu{at}/cpu.cfs_period_us"] = "100000"
    return write(root, files)


def test_version_2_takes_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    limits = {"/a/b": "max 100000", "/a": "250000 100000", "": "400000 100000", "/c": "1 100000"}
    assert cpu_quota(v2(tmp_path, "/a/b", limits)) == 2.5


def test_version_1_takes_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    assert cpu_quota(v1(tmp_path, "/a/b", {"/a/b": 300_000, "/a": 150_000, "": -1})) == 1.5


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nothing") is None
    assert cpu_quota(v2(tmp_path / "2", "/a", {"/a": "max 100000", "": "max 100000"})) is None
    assert cpu_quota(v1(tmp_path / "1", "/a", {"/a": -1, "": -1})) is None


def test_a_container_that_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    """The path is the host's, the mount begins at it."""
    mount = V1_MOUNT.replace(" / ", " /docker/f00 ")
    assert cpu_quota(v1(tmp_path / "own", "/docker/f00", {"": 200_000}, mount)) == 2
    inner = {"/x": 100_000, "": 200_000}
    assert cpu_quota(v1(tmp_path / "inner", "/docker/f00/x", inner, mount)) == 1
    assert cpu_quota(v1(tmp_path / "foreign", "/system", {"": 200_000}, mount)) == 2


def test_a_mount_with_spaces(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/sys/fs/cgroup\040two")
    root = v2(tmp_path, "/a", {" two/a": "50000 100000"}, mount)
    assert cpu_quota(root) == 0.5


@pytest.mark.parametrize("text", ["", "max", "x 100000", "100000 0", "0 100000", "-1 100000", "1"])
def test_limits_that_say_nothing_are_passed_over(tmp_path: Path, text: str) -> None:
    assert cpu_quota(v2(tmp_path, "/", {"": text})) is None


@given(text=st.text(max_size=60), mounts=st.text(max_size=60))
def test_no_text_breaks_it(
    tmp_path_factory: pytest.TempPathFactory, text: str, mounts: str
) -> None:
    root = tmp_path_factory.mktemp("any")
    write(root, {"proc/self/cgroup": text, "proc/self/mountinfo": V2_MOUNT + "\n" + mounts})
    assert cpu_quota(root) is None


@pytest.mark.parametrize(
    ("quota", "threads"), [(20_000, 1), (100_000, 1), (190_000, 1), (199_000, 2), (250_000, 2)]
)
def test_parts_of_a_processor_dont_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 4, 7})
    assert usable_processors(v2(tmp_path, "/", {"": f"{quota} 100000"})) == threads


def test_never_more_than_the_affinity_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    assert usable_processors(v2(tmp_path, "/", {"": "800000 100000"})) == 2
    assert usable_processors(tmp_path / "nothing") == 2


def test_this_machine() -> None:
    assert 1 <= usable_processors() <= len(os.sched_getaffinity(0))
