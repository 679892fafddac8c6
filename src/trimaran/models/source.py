"""The files that a model is made from: which they are, whether they changed, their digest."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core.errors import CheckpointError
from trimaran.models.huggingface import CONFIG_NAME, GENERATION_NAME
from trimaran.models.load import only_gguf
from trimaran.models.tokenizer_config import CONFIG_NAME as TOKENIZER_CONFIG_NAME
from trimaran.models.tokenizer_config import SPECIAL_NAME

TEXT_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG_NAME,
    SPECIAL_NAME,
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Of a Hugging Face folder: what its tokenizer and its chat template are made from."""

_SETTLED_SECONDS = 2.0
"""A file that changed so recently may change again within the same tick of its clock."""

Identity = list[list[Any]]
"""By file: name, size, number in the file system, times of change. Plain JSON values."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files at one moment.

    Attributes:
        name: of the file or folder, for people.
        sha256: of the file; of a folder, over the names and digests of its files.
        size: bytes of all files.
    """

    name: str
    sha256: str
    size: int


def source_files(path: Path) -> list[Path]:
    """Every file that decides what a model computes or how its text is cut, in order.

    Args:
        path: as `load_checkpoint` takes it.

    Raises:
        CheckpointError: it is no model.
    """
    if not path.is_dir():
        return [path]
    file = only_gguf(path)
    if file is not None:
        return [file]
    names = [CONFIG_NAME, GENERATION_NAME, *TEXT_FILES]
    weights = sorted(path.glob("*.safetensors*"))
    return [path / name for name in names if (path / name).exists()] + weights


def identity(path: Path) -> Identity:
    """What changes whenever a file is written, moved or replaced, and is cheap to tell.

    Raises:
        CheckpointError: it is no model, or a file can't be read.
    """
    files = []
    for file in source_files(path):
        try:
            stat = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
        times = [stat.st_mtime_ns, stat.st_ctime_ns]
        files.append([_name(path, file), stat.st_size, stat.st_ino, *times])
    return files


def is_settled(found: Identity) -> bool:
    """Whether the next change of a file will show in its identity: not where one changed so
    recently that another change could have the same time."""
    latest = max((max(times) for _, _, _, *times in found), default=0)
    return time.time_ns() - latest > _SETTLED_SECONDS * 1e9


def read_source(path: Path) -> Source:
    """Hashes a model's files.

    Raises:
        CheckpointError: one can't be read.
    """
    files = source_files(path)
    digests = [_digest(file) for file in files]
    size = sum(size for _, size in digests)
    if len(files) == 1:
        return Source(files[0].name, digests[0][0], size)
    return Source(path.resolve().name, _digest_of_all(path, files, digests), size)


def _digest_of_all(path: Path, files: Sequence[Path], digests: Sequence[tuple[str, int]]) -> str:
    lines = [
        f"{digest} {_name(path, file)}\n" for file, (digest, _) in zip(files, digests, strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest(file: Path) -> tuple[str, int]:
    try:
        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            return digest, os.fstat(handle.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}") from None


def _name(path: Path, file: Path) -> str:
    return file.relative_to(path).as_posix() if path.is_dir() else file.name
