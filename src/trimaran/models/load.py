"""From a path to a model: which format it is, and everything made from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import (
    CheckpointError,
    ModelNotFoundError,
    TemplateError,
    UnsupportedModelError,
)
from trimaran.models.config import ModelConfig
from trimaran.models.encoder_folder import is_encoder
from trimaran.models.gguf import GGUFFile
from trimaran.models.gguf_model import read_config, read_weights
from trimaran.models.huggingface import CONFIG_NAME, HuggingFaceModel
from trimaran.models.model import Model
from trimaran.models.registry import build_model, check_architecture
from trimaran.models.weight import Weight

if TYPE_CHECKING:
    from trimaran.models.chat_template import ChatTemplate
    from trimaran.models.tokenizer import Tokenizer

_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, its header read and checked, its weights mapped.

    Attributes:
        path: the GGUF file or the folder.
        name: for people: the file's stem, the folder's name, or a hub's "owner/name".
        fingerprint: 64 hexadecimal digits that change with the configuration, the header of
            any file, or the sampled bytes (start, middle, end) of any tensor; they don't
            depend on where the files lie or when they were written.
        metadata: of the GGUF file; None for a folder.
    """

    path: Path
    name: str
    model: Model
    fingerprint: str
    metadata: Mapping[str, object] | None

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built anew.

        Raises:
            CheckpointError: it is missing or unsound.
        """
        from trimaran.models.tokenizer import Tokenizer

        with _named(self.path):
            if self.metadata is not None:
                return Tokenizer.from_gguf(self.metadata)
            return Tokenizer.from_folder(self.path)

    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one.

        Raises:
            TemplateError: it is invalid.
        """
        from trimaran.models.chat_template import ChatTemplate

        with _named(self.path):
            if self.metadata is not None:
                return ChatTemplate.from_gguf(self.metadata)
            return ChatTemplate.from_folder(self.path)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a model's configuration and maps its weights; reads no weight but samples.

    Args:
        path: a GGUF file, a folder with config.json and safetensors, or a folder with
            exactly one GGUF file.

    Raises:
        ModelNotFoundError: nothing is there.
        CheckpointError: truncated, corrupt, foreign, or tensors that are missing, superfluous
            or of another shape than the configuration says.
        UnsupportedModelError: sound, but its architecture, a block type or a field of its
            configuration isn't implemented.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist; give a GGUF file or a model's folder")
    if path.is_dir():
        gguf_file = only_gguf(path)
        return _load_folder(path) if gguf_file is None else _load_gguf(gguf_file)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} holds weights but no configuration; give the folder that it lies in"
        )
    return _load_gguf(path)


def only_gguf(folder: Path) -> Path | None:
    """The one GGUF file of a folder that is no Hugging Face folder; None for one that is.

    Raises:
        CheckpointError: it is neither, or there are several.
    """
    gguf_files = sorted(folder.glob("*.gguf"))
    # Folders of GGUF files often carry a config.json too, so safetensors decide.
    if (folder / CONFIG_NAME).exists() and (not gguf_files or any(folder.glob("*.safetensors*"))):
        return None
    return _only_file(folder, gguf_files)


def _only_file(folder: Path, gguf_files: list[Path]) -> Path:
    if not gguf_files:
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(
                f"{folder} is an adapter (LoRA), not a model; give its base model"
            )
        raise CheckpointError(f"{folder} has neither {CONFIG_NAME} nor a GGUF file")
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files[:8])
        raise CheckpointError(
            f"{folder} has {len(gguf_files)} GGUF files ({names}); give the path of one"
        )
    return gguf_files[0]


def _load_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: general.architecture is {architecture!r}; it must be text")
    check_architecture(architecture, str(path))
    config = read_config(file, architecture)
    with _named(path):
        model = build_model(config, read_weights(file, config))
    fingerprint = _fingerprint(config, [(file.header, file.size)], model.weights)
    return Checkpoint(path, path.stem, model, fingerprint, file.metadata)


def _load_folder(folder: Path) -> Checkpoint:
    if is_encoder(folder):
        raise UnsupportedModelError(
            f"{folder} is an encoder: it makes embeddings and generates no text; serve it with"
            " `trimaran serve` and ask /v1/embeddings, or give another model"
        )
    found = HuggingFaceModel.open(folder)
    with _named(folder):
        model = build_model(found.config, found.weights)
    headers = [(file.header, file.size) for file in found.files]
    fingerprint = _fingerprint(found.config, headers, model.weights)
    return Checkpoint(folder, _folder_name(folder), model, fingerprint, None)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Puts the path before the message of an error that doesn't name it yet."""
    try:
        yield
    except (CheckpointError, TemplateError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


def _folder_name(folder: Path) -> str:
    """The folder's name, or "owner/name" within a hub's cache
    (`models--owner--name/snapshots/<revision>`)."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name


def _fingerprint(
    config: ModelConfig,
    headers: Iterable[tuple[npt.NDArray[np.uint8], int]],
    weights: Mapping[str, Weight],
) -> str:
    """SHA-256 over the configuration, each file's (header, size), and samples of each tensor."""
    digest = hashlib.sha256(repr(config).encode())
    for header, size in headers:
        digest.update(f"{header.size} {size}".encode())
        digest.update(header.data)
    for name in sorted(weights):
        weight = weights[name]
        data = weight.storage.raw().reshape(-1)
        digest.update(f"{name} {weight.shape} {weight.storage.type_name} {data.size}".encode())
        for start in (0, data.size // 2, max(0, data.size - _SAMPLE_BYTES)):
            digest.update(data[start : start + _SAMPLE_BYTES].data)
    return digest.hexdigest()
