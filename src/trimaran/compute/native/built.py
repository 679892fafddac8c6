"""A model made ready for the kernels: its plan and its packed matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.compute.native import _native
from trimaran.compute.native.packing import pack_all
from trimaran.compute.native.plan import Plan
from trimaran.compute.native.program import build_plan
from trimaran.compute.native.recorder import record
from trimaran.compute.processors import usable_processors
from trimaran.core.config import WEIGHTS
from trimaran.core.errors import BackendError, CapacityError
from trimaran.models.config import ModelConfig
from trimaran.models.model import Model


@dataclass(frozen=True, slots=True, eq=False)
class BuiltModel:
    """What the native back end runs; made from a checkpoint, or read from a build.

    Attributes:
        isa: the instruction set that the matrices are packed for.
        weights: as in `EngineConfig`.
        matrices: by canonical name.
        kv: of `KV_FORMATS`, where it was decided; else each start decides. What is packed
            doesn't depend on it.
    """

    config: ModelConfig
    isa: str
    weights: str
    plan: Plan
    matrices: Mapping[str, _native.PackedLinear]
    kv: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices.values())


def build(model: Model, weights: str, isa: str, threads: int = 0) -> BuiltModel:
    """Records the model's forward and packs its matrices.

    Args:
        weights: one of `WEIGHTS`.
        isa: "auto" or one of `available_isas`.
        threads: that pack; 0 takes the CPUs this process may run on.

    Raises:
        BackendError: the machine lacks the instruction set, or the kernels can't work with
            the model's dimensions.
        CapacityError: the memory for the weights can't be had.
    """
    if weights not in WEIGHTS:
        raise BackendError(f"weights is '{weights}'; give one of {', '.join(WEIGHTS)}")
    isa = choose_isa(isa)
    try:
        tape = record(model)
        packed = pack_all(tape, weights, isa, threads or usable_processors())
        return BuiltModel(model.config, isa, weights, build_plan(tape), packed)
    except ValueError as error:
        raise BackendError(f"the native kernels can't run this model: {error}") from None
    except MemoryError:
        raise CapacityError(
            "there isn't enough memory for the packed weights; use a smaller model, or one"
            " that is quantised to fewer bits"
        ) from None


def choose_isa(isa: str) -> str:
    """The instruction set that "auto" means here, or the one that was named.

    Raises:
        BackendError: the machine lacks it.
    """
    if isa == "auto":
        return _native.available_isas()[-1]
    try:
        _native.check_isa(isa)
    except ValueError as error:
        raise BackendError(str(error)) from None
    return isa
