"""A built model in a folder of its own: written once, checked and read at every start.

    DIR/
    ├── build.trimaran        plan, packed weights, fingerprint (container.py has the layout)
    └── gguf-metadata.bin     tokenizer and chat template of a GGUF file,
        or tokenizer.json …   of a Hugging Face folder

The fingerprint says what a build is good for: the instruction set, what the weights were
rounded to, the KV cache if that was decided, and the sources of the kernels and of the code
that records and packs. A build of other sources is stale, however small the difference: nobody
has to remember to say so.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

import numpy as np

from trimaran import models
from trimaran.compute import native
from trimaran.compute.native import BUILD_FILE, _native
from trimaran.compute.native.built import BuiltModel
from trimaran.compute.native.container import Container, aligned, write_container
from trimaran.compute.native.plan import Float32, Plan
from trimaran.compute.processors import usable_processors
from trimaran.core.config import KV_FORMATS
from trimaran.core.errors import BackendError, BuildError
from trimaran.models.config import ModelConfig
from trimaran.models.rope import Llama3Scaling, RopeSpec
from trimaran.models.source import Source


@functools.cache
def maker() -> str:
    """A hash of everything that decides what a build holds: the kernels' sources, and the
    modules that read, record and pack a model."""
    digest = hashlib.sha256(f"{_native.KERNEL_VERSION} {_native.SOURCE_HASH}".encode())
    for package in (models, native):
        for folder in package.__path__:
            for file in sorted(Path(folder).glob("*.py")):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _version() -> str:
    return f"{_native.KERNEL_VERSION}-{maker()[:12]}"


def write_build(
    folder: Path, built: BuiltModel, source: Source, text_files: Mapping[str, bytes]
) -> None:
    """Writes the files of a build into an empty folder, and has them on the disk.

    Raises:
        OSError: they can't be written.
    """
    plan, vectors = built.plan.to_json()
    sections = [_native.packed_bytes(matrix) for matrix in built.matrices.values()]
    header = {
        "maker": maker(),
        "version": _version(),
        "isa": built.isa,
        "weights": built.weights,
        "kv": built.kv,
        "source": asdict(source),
        "text_files": {name: _digest(content) for name, content in text_files.items()},
        "model": asdict(built.config),
        "plan": plan,
        "matrices": [
            [name, matrix.format, _native.packed_layout(matrix)]
            for name, matrix in built.matrices.items()
        ],
        "vectors": [vector.size for vector in vectors],
    }
    for name, content in text_files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_container(folder / BUILD_FILE, header, sections + [v.view(np.uint8) for v in vectors])


@dataclass(frozen=True, slots=True)
class Build:
    """A build whose header was read and verified, and which is good for this Trimaran.

    Attributes:
        kv: as in `BuiltModel`.
        config: of the model.
        text_files: names of the files beside, verified.
        nbytes: of the data.
    """

    folder: Path
    isa: str
    weights: str
    kv: str | None
    source: Source
    config: ModelConfig
    text_files: tuple[str, ...]
    nbytes: int
    _container: Container

    @classmethod
    def open(cls, path: Path, known_text_files: tuple[str, ...]) -> Self:
        """Reads and verifies all but the weights.

        Args:
            path: the folder, or its `BUILD_FILE`.
            known_text_files: those that there may be.

        Raises:
            BuildError: it is missing, truncated or corrupt, or was made by another Trimaran.
        """
        folder = path.parent if path.name == BUILD_FILE else path
        container = Container.open(folder / BUILD_FILE)
        header = container.header
        if header.get("maker") != maker():
            raise BuildError(
                f"{folder} is stale: it was built by another version of Trimaran, with kernels"
                f" {header.get('version')}; this one has {_version()}; build the model again"
            )
        try:
            return cls(
                folder,
                _text(header["isa"]),
                _text(header["weights"]),
                _kv(header["kv"]),
                Source(**header["source"]),
                _config(header["model"]),
                _check_text_files(folder, header["text_files"], known_text_files),
                container.data_bytes,
                container,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _unsound(folder, error) from None

    def check_options(self, weights: str, isa: str, kv: str = "auto") -> None:
        """Refuses options that the build doesn't have. "as-is" and "auto" take what it has.

        Raises:
            BuildError: it has other weights, or is for another KV cache.
            BackendError: it is for another instruction set, or one that this machine lacks.
        """
        if weights not in ("as-is", self.weights):
            raise BuildError(
                f"weights is '{weights}', but {self.folder} was built with '{self.weights}'; leave"
                " the option out, or build the model again with it"
            )
        if kv != "auto" and self.kv not in (None, kv):
            raise BuildError(
                f"kv is '{kv}', but {self.folder} was built with '{self.kv}'; leave the option"
                " out, or build the model again with it"
            )
        if isa not in ("auto", self.isa):
            raise BackendError(
                f"isa is '{isa}', but {self.folder} was built for '{self.isa}'; leave the option"
                " out, or build the model again with it"
            )
        try:
            _native.check_isa(self.isa)
        except ValueError as error:
            raise BackendError(
                f"{self.folder} was built for '{self.isa}': {error}; build the model again here"
            ) from None

    def load(self, threads: int = 0) -> BuiltModel:
        """Reads the weights, verifying every byte.

        Args:
            threads: that read; 0 takes the CPUs this process may run on.

        Raises:
            BuildError: they are truncated or corrupt.
            CapacityError: there isn't enough memory for them.
        """
        memory = self._container.read_data(threads or usable_processors())
        header = self._container.header
        try:
            at = 0
            matrices = {}
            for name, format_, layout in header["matrices"]:
                matrix = _native.packed_from(memory, at, format_, **layout)
                matrices[name] = matrix
                at += aligned(matrix.nbytes)
            vectors: list[Float32] = []
            data = memory.array()
            for size in header["vectors"]:
                vectors.append(data[at : at + 4 * size].view(np.float32))
                if vectors[-1].size != size:
                    raise ValueError("vectors end outside the data")
                at += aligned(4 * size)
            if at != data.size:
                raise ValueError("there are data that nothing refers to")
            plan = Plan.from_json(header["plan"], vectors)
            plan.program(matrices)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unsound(self.folder, error) from None
        return BuiltModel(self.config, self.isa, self.weights, plan, matrices, self.kv)


def _unsound(folder: Path, error: Exception) -> BuildError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BuildError(f"{folder} is unsound: {text}; build the model again")


def _check_text_files(
    folder: Path, written: Mapping[str, Any], known: tuple[str, ...]
) -> tuple[str, ...]:
    """Those that were written are as they were, and none came to them."""
    for name in known:
        try:
            found = (folder / name).read_bytes()
        except FileNotFoundError:
            if name in written:
                raise BuildError(
                    f"{folder} lacks {name}, which was a part of it; build the model again"
                ) from None
            continue
        except OSError as error:
            raise BuildError(f"{folder / name} can't be read: {error.strerror}") from None
        if written.get(name) != _digest(found):
            raise BuildError(
                f"{folder / name} isn't what was built; build the model again from its source"
            )
    if unknown := set(written) - set(known):
        raise ValueError(f"{sorted(unknown)} among its files")
    return tuple(written)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _kv(value: object) -> str | None:
    if value is not None and value not in KV_FORMATS:
        raise ValueError(f"kv is {value!r}")
    return None if value is None else str(value)


def _config(values: Mapping[str, Any]) -> ModelConfig:
    local = values["local_rope"]
    read = {
        "rope": _rope(values["rope"]),
        "local_rope": None if local is None else _rope(local),
        "eos_token_ids": tuple(values["eos_token_ids"]),
        "windows": tuple(values["windows"]),
    }
    config = ModelConfig(**{**values, **read})
    if any(type(window) is not int or window < 0 for window in config.windows) or (
        config.windows and len(config.windows) != config.num_layers
    ):
        raise TypeError(f"windows is {config.windows!r}")
    hints = get_type_hints(ModelConfig)
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        if hints[field.name] is int and (type(value) is not int or value < 1):
            raise TypeError(f"{field.name} is {value!r}")
    return config


def _rope(values: Mapping[str, Any]) -> RopeSpec:
    rope = dict(values)
    if rope["llama3"] is not None:
        rope["llama3"] = Llama3Scaling(**rope["llama3"])
    if rope["divisors"] is not None:
        rope["divisors"] = tuple(rope["divisors"])
    return RopeSpec(**rope)
