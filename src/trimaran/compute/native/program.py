"""From a recorded forward to a program: which buffer each symbol lives in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from trimaran.compute.native import _native
from trimaran.compute.native.recorder import (
    Add,
    Angles,
    Attention,
    Embed,
    GatedLinear,
    Gather,
    Linear,
    Node,
    Part,
    RmsNorm,
    Rope,
    SiluMul,
    Symbol,
    Tape,
    inputs_of,
    outputs_of,
)
from trimaran.models.weight import Weight

Packed = Mapping[str, _native.PackedLinear]


class _Buffers:
    """Gives each symbol a buffer from its first to its last use.

    An operation that reads and writes the same element may write over an input that nothing
    reads later; other outputs never share a buffer with the node's inputs.
    """

    def __init__(self, program: _native.Program, tape: Tape) -> None:
        self._program = program
        self._last_use = {
            symbol: index for index, node in enumerate(tape.nodes) for symbol in inputs_of(node)
        }
        self._last_use[tape.logits] = len(tape.nodes)
        self._numbers: dict[Symbol, int] = {}
        self._direct = direct_symbols(tape)
        self._free: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)

    def __getitem__(self, symbol: Symbol) -> int:
        return self._numbers[symbol]

    def direct(self, symbol: Symbol) -> bool:
        """Whether who makes it may round it for the linear layer that reads it."""
        return symbol in self._direct

    def place(self, index: int, node: Node) -> None:
        """Finds buffers for the node's outputs, then frees those of its dead inputs."""
        dead = [s for s in dict.fromkeys(inputs_of(node)) if self._last_use[s] == index]
        for out, over in _overwrites(node):
            if over is not None and over in dead:
                dead.remove(over)
                self._numbers[out] = self._numbers[over]
        for out in outputs_of(node):
            if out not in self._numbers:
                free = self._free[out.width, out.logits]
                self._numbers[out] = (
                    free.pop() if free else self._program.buffer(out.width, out.logits)
                )
        for symbol in dead:
            self._free[symbol.width, symbol.logits].append(self._numbers[symbol])


def direct_symbols(tape: Tape) -> set[Symbol]:
    """Outputs of attention and gated layers that nothing but the next node reads, a linear layer.

    So no more than one of them is alive at any time.
    """
    return {
        node.out
        for node, reader in pairwise(tape.nodes)
        if isinstance(node, Attention | GatedLinear)
        and isinstance(reader, Linear)
        and reader.x is node.out
        and sum(node.out in inputs_of(other) for other in tape.nodes) == 1
        and inputs_of(reader).count(node.out) == 1
    }


def _overwrites(node: Node) -> list[tuple[Symbol, Symbol | None]]:
    """(output, input that it may be written over) pairs."""
    match node:
        case Rope(out=out, x=x) | RmsNorm(out=out, x=x) | Add(out=out, x=x):
            return [(out, x)]
        case SiluMul(out=out, gate=gate):
            return [(out, gate)]
        case Linear(parts=parts) if len(parts) == 1:
            return [(parts[0].out, parts[0].residual)]
    return []


def build_program(tape: Tape, packed: Packed) -> _native.Program:
    """The program of a recorded forward.

    Args:
        packed: by name, the weights of `recorder.matrices_of`.
    """
    program = _native.Program()
    buffers = _Buffers(program, tape)
    for index, node in enumerate(tape.nodes):
        buffers.place(index, node)
        _emit(program, buffers, node, packed)
    program.finish(buffers[tape.logits])
    return program


def _emit(program: _native.Program, at: _Buffers, node: Node, packed: Packed) -> None:
    match node:
        case Embed(out, weight):
            program.embed(at[out], packed[weight.name])
        case Angles(out, spec):
            program.angles(at[out], spec.frequencies().tolist())
        case RmsNorm(out, x, weight, eps):
            program.rms_norm(at[out], at[x], _vector(weight), eps)
        case Rope(out, x, angles, heads):
            program.rope(at[out], at[x], at[angles], heads, x.width // heads)
        case Attention(out, q, k, v, spec):
            program.attention(
                at[out],
                at[q],
                at[k],
                at[v],
                spec.layer,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                spec.scale,
                at.direct(out),
            )
        case SiluMul(out, gate, up):
            program.silu_mul(at[out], at[gate], at[up])
        case Add(out, x, y):
            program.add(at[out], at[x], at[y])
        case Gather(out, x):
            program.gather(at[out], at[x])
        case Linear(x, parts):
            packed_parts = [_part(at, part, part.out, packed) for part in parts]
            program.linear(at[x], packed_parts, at.direct(x))
        case GatedLinear(out, x, gate, up):
            gates, values = (_part(at, part, out, packed) for part in (gate, up))
            program.gated_linear(at[x], gates, values, at.direct(out))


def _part(
    at: _Buffers, part: Part, out: Symbol, packed: Packed
) -> tuple[_native.PackedLinear, list[float], int, int]:
    residual = -1 if part.residual is None else at[part.residual]
    return packed[part.weight.name], _vector(part.bias), at[out], residual


def _vector(weight: Weight | None) -> list[float]:
    if weight is None:
        return []
    values: list[float] = weight.values().reshape(-1).tolist()
    return values
