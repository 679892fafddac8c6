"""A recorded plan: the calls that make a program, with its matrices by name.

What a plan holds is written down as JSON, apart from its vectors, and read back to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.compute.native import _native
from trimaran.core.errors import BuildError

Float32 = npt.NDArray[np.float32]

_CALLS = frozenset(
    name for name in vars(_native.Program) if not name.startswith("_") and name != "buffer"
)
_BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix, as an argument of a call."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """float32 [n], as an argument of a call."""

    values: Float32


@dataclass(slots=True)
class Plan:
    """Calls of `_native.Program`'s methods in order.

    An argument is a number, a `Matrix`, a `Vector`, or a list of arguments.
    """

    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    _buffers: int = 0

    def buffer(self, width: int, logits: bool) -> int:
        """Number of a new buffer."""
        self.calls.append((_BUFFER, [width, logits]))
        self._buffers += 1
        return self._buffers - 1

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, list(arguments)))

    def program(self, packed: Mapping[str, _native.PackedLinear]) -> _native.Program:
        """The program over these matrices.

        Raises:
            ValueError, TypeError: the plan is unsound.
        """
        program = _native.Program()
        for name, arguments in self.calls:
            getattr(program, name)(*[_bound(argument, packed) for argument in arguments])
        return program

    # ------------------------------------------------------------------ as JSON

    def to_json(self) -> tuple[list[Any], list[Float32]]:
        """(JSON value, vectors that it refers to by number)."""
        vectors: list[Float32] = []
        calls = [[name, [_written(item, vectors) for item in items]] for name, items in self.calls]
        return calls, vectors

    @classmethod
    def from_json(cls, calls: object, vectors: Sequence[Float32]) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            BuildError: it is none.
        """
        plan = cls()
        for call in calls if isinstance(calls, list) else [None]:
            match call:
                case [str(name), [*arguments]] if name in _CALLS or name == _BUFFER:
                    plan.call(name, *[_read(argument, vectors) for argument in arguments])
                case _:
                    raise BuildError(f"the plan has {str(call)[:80]!r}, which is no call")
        return plan


def _bound(argument: Any, packed: Mapping[str, _native.PackedLinear]) -> Any:
    match argument:
        case Matrix(name):
            if name not in packed:
                raise ValueError(f"the plan wants matrix {name!r}, which isn't there")
            return packed[name]
        case Vector(values):
            return values.tolist()
        case list():
            return [_bound(item, packed) for item in argument]
    return argument


def _written(argument: Any, vectors: list[Float32]) -> Any:
    match argument:
        case Matrix(name):
            return {"matrix": name}
        case Vector(values):
            vectors.append(values)
            return {"vector": len(vectors) - 1}
        case list():
            return [_written(item, vectors) for item in argument]
    return argument


def _read(argument: Any, vectors: Sequence[Float32]) -> Any:
    match argument:
        case {"matrix": str(name)}:
            return Matrix(name)
        case {"vector": int(index)} if 0 <= index < len(vectors):
            return Vector(vectors[index])
        case list():
            return [_read(item, vectors) for item in argument]
        case bool() | int() | float():
            return argument
    raise BuildError(f"the plan has {str(argument)[:80]!r}, which is no argument of a call")
