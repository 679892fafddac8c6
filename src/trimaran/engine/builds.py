"""The cache of built models, and builds in folders of the user's own.

    <cache>/builds/
    ├── smollm2-135m-0f3c…-91ab….lock     shared by readers, exclusive to who replaces it
    └── smollm2-135m-0f3c…-91ab…/         model's path, weights and instruction set; maker
        ├── build.trimaran, …             see compute/native/artifact.py
        └── seen.json                     the source's path, its identity when last hashed

A build appears by a rename, whole. It is used only if its source is still what it was built
from: by size, times and file number as in `seen.json`, else by hashing the source. Nothing
about the cache ever fails a start: what can't be used is built anew, and what can't be
written isn't.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.compute.native import is_build
from trimaran.core.errors import BuildError, TrimaranError
from trimaran.models.source import Identity, Source, identity, is_settled, read_source
from trimaran.models.store import cache_folder
from trimaran.models.text_files import NAMES, read_text_files, text_files

if TYPE_CHECKING:
    from trimaran.compute.native.artifact import Build
    from trimaran.compute.native.built import BuiltModel
    from trimaran.models.chat_template import ChatTemplate
    from trimaran.models.load import Checkpoint
    from trimaran.models.tokenizer import Tokenizer

log = logging.getLogger("trimaran")

MAX_BYTES = 16 << 30
"""Of all cached builds; those used longest ago go first."""

MAX_VERSIONS = 2
"""Of one model with the same options by different versions of Trimaran, so that two which are
both in use don't replace each other's all the time."""

_SEEN = "seen.json"
_WORK_PREFIX = ".building-"


@dataclass(frozen=True, slots=True)
class CachedBuild:
    """A build in the cache.

    Attributes:
        source: path of the model that it was built from, as far as known.
        used: when it was last used, seconds since the epoch.
        state: "ready", or why it can't be used.
    """

    name: str
    source: str
    weights: str
    isa: str
    nbytes: int
    used: float
    state: str


@dataclass(frozen=True, slots=True)
class LoadedBuild:
    """All that a build holds, read and verified."""

    built: BuiltModel
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_build(
    path: Path, weights: str, isa: str, kv: str = "auto", threads: int = 0
) -> LoadedBuild:
    """The build in a folder of the user's.

    Args:
        weights, isa, kv: as in `EngineConfig`; "as-is" and "auto" take what the build has.
        threads: that read; 0 takes the CPUs this process may run on.

    Raises:
        BuildError: it is truncated or corrupt, was made by another Trimaran, has other
            weights, or is for another KV cache.
        BackendError: it is for another instruction set.
        CapacityError: there isn't enough memory for it.
    """
    build = _open(path)
    build.check_options(weights, isa, kv)
    return _load(build, threads)


def save_build(folder: Path, built: BuiltModel, checkpoint: Checkpoint) -> Path:
    """Writes a build into a folder of the user's, where it appears whole; that folder.

    Raises:
        BuildError: the folder holds something else, or can't be written.
    """
    if not _is_replaceable(folder):
        raise BuildError(f"{folder} exists and is no build; give the name of a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = _write(folder.parent, built, checkpoint)
        try:
            _replace(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise BuildError(
            f"the build can't be written to {folder}: {error.strerror or error}"
        ) from None
    return folder


class BuildStore:
    """The cached builds below one folder; safe across processes and threads."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        """`folder` defaults to `builds` in `cache_folder()`."""
        self.folder = cache_folder() / "builds" if folder is None else folder
        self._max_bytes = max_bytes

    def has(self, path: Path, weights: str, isa: str) -> bool:
        """Whether there is a build of this model, good or not, of any version of Trimaran."""
        return bool(self._versions(self._place(path, weights, isa)))

    def load(self, path: Path, weights: str, isa: str, threads: int = 0) -> LoadedBuild | None:
        """The build of a model as it is now; None where there is none that can be used.

        Args:
            path: of the model.
            isa: an instruction set, not "auto".
        """
        place = self._place(path, weights, isa)
        if not place.exists():
            return None
        try:
            with self._lock(place, fcntl.LOCK_SH):
                build = _open(place)
                if (build.weights, build.isa) != (weights, isa):
                    raise BuildError(f"{place} holds another build; build the model again")
                _check_source(place, path, build.source)
                loaded = _load(build, threads)
                with suppress(OSError):
                    os.utime(place)
                return loaded
        except (TrimaranError, OSError) as error:
            log.info("the cached build isn't used: %s", error)
            return None

    def save(self, path: Path, built: BuiltModel, checkpoint: Checkpoint, seen: Identity) -> Path:
        """Keeps a build for later starts, in place of an older one; the folder it is in.

        Args:
            seen: the source's identity before it was read.

        Raises:
            BuildError: there is no room for it, it can't be written, or the source changed.
        """
        place = self._place(path, built.weights, built.isa)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(built.nbytes, keep=place)
            work = _write(self.folder, built, checkpoint)
            try:
                if identity(path) != seen:
                    raise BuildError(f"{path} changed while it was built; build it again")
                _write_seen(work, path, seen)
                with self._lock(place, fcntl.LOCK_EX):
                    _replace(work, place)
                for old in self._versions(place)[:-MAX_VERSIONS]:
                    self._remove(old)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise BuildError(
                f"the build can't be kept in {self.folder}: {error.strerror or error}"
            ) from None
        return place

    def list_builds(self) -> list[CachedBuild]:
        """Every cached build, the last used first; verifies all but the weights."""
        return [self._describe(place) for place in reversed(self._places())]

    def clean(self) -> int:
        """Deletes every cached build; returns the bytes freed.

        Raises:
            BuildError: they can't be deleted.
        """
        if not self.folder.exists():
            return 0
        freed = _size(self.folder)
        try:
            for place in self._places():
                self._remove(place)
            for left in (*self.folder.glob(f"{_WORK_PREFIX}*"), *self.folder.glob("*.lock")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            raise BuildError(
                f"the builds in {self.folder} can't be deleted: {error.strerror or error}"
            ) from None
        return freed

    # ------------------------------------------------------------------ inside

    def _place(self, path: Path, weights: str, isa: str) -> Path:
        from trimaran.compute.native.artifact import maker

        whole = path.resolve()
        key = hashlib.sha256(f"{whole}\0{weights}\0{isa}".encode(errors="surrogateescape"))
        return self.folder / f"{whole.stem[:40]}-{key.hexdigest()[:16]}-{maker()[:8]}"

    def _places(self, pattern: str = "*") -> list[Path]:
        """Those used longest ago first."""
        found = [
            (path.stat().st_mtime, path)
            for path in self.folder.glob(pattern)
            if path.is_dir() and not path.name.startswith(_WORK_PREFIX)
        ]
        return [path for _, path in sorted(found)]

    def _versions(self, place: Path) -> list[Path]:
        """Builds of the same model with the same options by any version of Trimaran."""
        return self._places(f"{glob.escape(place.name.rpartition('-')[0])}-????????")

    def _remove(self, place: Path) -> None:
        with self._lock(place, fcntl.LOCK_EX):
            shutil.rmtree(place)
        with suppress(OSError):
            place.with_name(f"{place.name}.lock").unlink()

    def _make_room(self, nbytes: int, keep: Path) -> None:
        """Deletes old builds until another one of `nbytes` fits into the cache, which leaves
        at least half of the disk's free space.

        Raises:
            BuildError: it never fits.
        """
        others = [place for place in self._places() if place != keep]
        sizes = {place: _size(place) for place in others}
        total = sum(sizes.values())
        free = shutil.disk_usage(self.folder).free
        limit = min(self._max_bytes, (free + total) // 2)
        if nbytes > limit:
            raise BuildError(
                f"a build of {nbytes} bytes can't be kept in {self.folder}, where {limit} are the"
                " most that builds may take (half of the free space at most); free some, or"
                " build into another folder with `trimaran build -o`"
            )
        for place in others:
            if total + nbytes <= limit:
                break
            self._remove(place)
            total -= sizes[place]

    def _describe(self, place: Path) -> CachedBuild:
        path = str(_read_seen(place).get("path", ""))
        weights, isa, state = "", "", "ready"
        try:
            build = _open(place)
            weights, isa = build.weights, build.isa
            build.check_options(weights, isa)
            _check_source(place, Path(path), build.source)
        except TrimaranError as error:
            state = str(error)
        used = place.stat().st_mtime
        return CachedBuild(place.name, path, weights, isa, _size(place), used, state)

    @contextmanager
    def _lock(self, place: Path, kind: int) -> Iterator[None]:
        """Of one build; a reader that may not write here goes without."""
        path = place.with_name(f"{place.name}.lock")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            if kind == fcntl.LOCK_EX:
                raise
            yield
            return
        try:
            fcntl.flock(handle, kind)
            yield
        finally:
            os.close(handle)


# ---------------------------------------------------------------------- one build


def _open(path: Path) -> Build:
    from trimaran.compute.native.artifact import Build

    return Build.open(path, NAMES)


def _load(build: Build, threads: int) -> LoadedBuild:
    built = build.load(threads)
    return LoadedBuild(built, *read_text_files(build.folder, build.text_files))


def _write(parent: Path, built: BuiltModel, checkpoint: Checkpoint) -> Path:
    """A build in a folder of its own below `parent`, not yet under its name."""
    from trimaran.compute.native.artifact import write_build

    _remove_abandoned(parent)
    work = _new_folder(parent)
    try:
        write_build(work, built, read_source(checkpoint.path), text_files(checkpoint))
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return work


def _new_folder(parent: Path) -> Path:
    folder = parent / f"{_WORK_PREFIX}{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def _replace(work: Path, place: Path) -> None:
    """Gives a written build its name; what had it before is deleted."""
    old = _new_folder(place.parent)
    try:
        if place.exists():
            os.rename(place, old / "old")
        os.rename(work, place)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    """Whether a build may be put there: nothing, an empty folder, or a build."""
    if not folder.exists():
        return True
    return folder.is_dir() and (is_build(folder) or not any(folder.iterdir()))


def _check_source(place: Path, path: Path, source: Source) -> None:
    """Raises BuildError if the model isn't what the build was made from."""
    now = identity(path)
    if _read_seen(place).get("files") == now:
        return
    if read_source(path).sha256 != source.sha256:
        raise BuildError(f"{path} has changed since it was built; build the model again")
    with suppress(OSError):
        _write_seen(place, path, now)


def _read_seen(place: Path) -> dict[str, object]:
    try:
        record = json.loads((place / _SEEN).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_seen(place: Path, path: Path, found: Identity) -> None:
    record = {"path": str(path.resolve()), "files": found if is_settled(found) else None}
    work = place / f"{_SEEN}.{os.getpid()}"
    work.write_text(json.dumps(record))
    os.replace(work, place / _SEEN)


def _remove_abandoned(parent: Path) -> None:
    """Deletes what killed processes left: nobody writes a build for so long."""
    for left in parent.glob(f"{_WORK_PREFIX}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 24 * 3600:
                shutil.rmtree(left, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
