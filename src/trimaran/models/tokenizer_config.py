"""tokenizer_config.json and special_tokens_map.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimaran.core.errors import CheckpointError
from trimaran.models.json_file import read_json_object

CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAME = "special_tokens_map.json"

MAX_BYTES = 16 << 20
"""Some list thousands of added tokens one by one."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The fields of both files; those of tokenizer_config.json come first."""

    folder: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, folder: Path) -> TokenizerConfig:
        """Reads what is there; neither file has to be.

        Raises:
            CheckpointError: a file is not sound JSON.
        """
        values: dict[str, object] = {}
        for name in (SPECIAL_NAME, CONFIG_NAME):
            if (folder / name).exists():
                found = read_json_object(folder / name, MAX_BYTES)
                values |= {key: value for key, value in found.items() if value is not None}
        return cls(folder, values)

    def token(self, key: str) -> str | None:
        """The text of a special token such as "bos_token", written as text or as an object.

        Raises:
            CheckpointError: neither.
        """
        value = self.values.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise self._wrong(key, value, "a token's text")
        return text

    def flag(self, key: str) -> bool | None:
        """A switch such as "add_bos_token", or None where it isn't set.

        Raises:
            CheckpointError: not a boolean.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: {key} of {CONFIG_NAME} or {SPECIAL_NAME} is {value!r}, not {expected}"
        )
