"""How many processors this process may use: its affinity mask, and the quota of its cgroups."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ALMOST = 0.05  # a quota this little below a whole number counts as it


def usable_processors(root: Path = Path("/")) -> int:
    """Threads that can compute at the same time, at least 1.

    A part of a processor doesn't count: threads that compute together use up such a quota
    before its period ends, and then all of them stop for the rest of it.

    Args:
        root: where /proc and the mounted cgroups are looked for.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, math.floor(quota + _ALMOST)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The processors that the cgroups of this process may use, on the average of a period.

    Every group on the way to the root may have a limit, and the least counts. None where
    there is none, or where the system has no cgroups. Versions 1 and 2 are read, as the
    kernel's admin-guide/cgroup-v2 and scheduler/sched-bwc document them.
    """
    limits = [
        limit
        for folder, version in _groups(root)
        if (limit := _limit_v2(folder) if version == 2 else _limit_v1(folder)) is not None
    ]
    return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy of cgroups in the file system: its group `top` is seen at `point`."""

    top: PurePosixPath
    point: PurePosixPath
    version: int


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version) of each group that may limit this process."""
    own = _own_groups(root)
    for mount in _mounts(root):
        group = own.get(mount.version)
        if group is None:
            continue
        # In a container the mount may begin at its own group, or not show it at all.
        below = group.relative_to(mount.top) if group.is_relative_to(mount.top) else "."
        base = root / mount.point.relative_to("/")
        folder = base / below
        while True:
            yield folder, mount.version
            if folder == base:
                break
            folder = folder.parent


def _own_groups(root: Path) -> dict[int, PurePosixPath]:
    """This process's group by version, from lines `number:controllers:path`."""
    groups: dict[int, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/") or ".." in PurePosixPath(path).parts:
            continue
        if number == "0" and not controllers:
            groups[2] = PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            groups[1] = PurePosixPath(path)
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    """The hierarchies with the cpu controller, from proc(5)'s mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        place, kind = fields.split(), rest.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        top, point = (PurePosixPath(_unescaped(field)) for field in place[3:5])
        if not point.is_absolute():
            continue
        if kind[0] == "cgroup2":
            yield _Mount(top, point, 2)
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            yield _Mount(top, point, 1)


def _limit_v2(folder: Path) -> float | None:
    """`cpu.max` has "quota period" in microseconds, or "max period"."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    return _ratio(*words) if len(words) == 2 else None


def _limit_v1(folder: Path) -> float | None:
    """A quota of -1 is none."""
    quota, period = (
        "".join(_lines(folder / f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period")
    )
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None
    return int(quota) / int(period)


def _unescaped(field: str) -> str:
    """mountinfo writes spaces and the like in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []
