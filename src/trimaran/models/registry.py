"""Which class computes which architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trimaran.core.errors import UnsupportedModelError, nearest
from trimaran.models.config import ModelConfig
from trimaran.models.gemma3 import Gemma3Model
from trimaran.models.llama import LlamaModel
from trimaran.models.model import Model
from trimaran.models.qwen2 import Qwen2Model
from trimaran.models.weight import Weight

ARCHITECTURES: Mapping[str, Callable[[ModelConfig, Mapping[str, Weight]], Model]] = {
    "llama": LlamaModel,
    "qwen2": Qwen2Model,
    "gemma3": Gemma3Model,
}


def check_architecture(name: str, where: str) -> None:
    """Refuses an architecture that isn't implemented; `where` names the file.

    Raises:
        UnsupportedModelError: names it and those that are.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: architecture {name!r} is not supported; these are:"
            f" {', '.join(ARCHITECTURES)}.{nearest(name, ARCHITECTURES)}"
        )


def build_model(config: ModelConfig, weights: Mapping[str, Weight]) -> Model:
    """The model of `config.architecture` over `weights`.

    Raises:
        UnsupportedModelError: the architecture isn't implemented.
        CheckpointError: names a tensor that is missing, superfluous or of another shape.
    """
    check_architecture(config.architecture, "the configuration")
    return ARCHITECTURES[config.architecture](config, weights)
