"""What a built model keeps of its checkpoint for text: tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from trimaran.core.errors import CheckpointError
from trimaran.models.chat_template import ChatTemplate
from trimaran.models.gguf import GGUFFile
from trimaran.models.load import Checkpoint
from trimaran.models.source import TEXT_FILES
from trimaran.models.tokenizer import Tokenizer

GGUF_METADATA = "gguf-metadata.bin"
"""A GGUF file without tensors. Not named as one: it is no model."""

NAMES = (GGUF_METADATA, *TEXT_FILES)
"""Every file that there may be."""


def text_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Contents by name, enough to make the tokenizer and the chat template again.

    Raises:
        CheckpointError: a file can't be read.
    """
    if checkpoint.metadata is not None:
        return {GGUF_METADATA: GGUFFile.open(checkpoint.path).metadata_bytes()}
    try:
        return {
            name: (checkpoint.path / name).read_bytes()
            for name in TEXT_FILES
            if (checkpoint.path / name).exists()
        }
    except OSError as error:
        raise CheckpointError(f"{error.filename} can't be read: {error.strerror}") from None


def read_text_files(folder: Path, names: Collection[str]) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template from the files that `text_files` told.

    Raises:
        CheckpointError, TemplateError: they are unsound.
    """
    if GGUF_METADATA in names:
        metadata = GGUFFile.open(folder / GGUF_METADATA).metadata
        return Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata)
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
