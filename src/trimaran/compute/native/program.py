"""From a recorded forward to a plan: which buffer each symbol lives in."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from trimaran.compute.native.plan import Matrix, Plan, Vector
from trimaran.compute.native.recorder import (
    Add,
    Angles,
    Attention,
    Embed,
    GatedLinear,
    Gather,
    GeluMul,
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


class _Buffers:
    """Gives each symbol a buffer from its first to its last use.

    An operation that reads and writes the same element may write over an input that nothing
    reads later; other outputs never share a buffer with the node's inputs.
    """

    def __init__(self, plan: Plan, tape: Tape) -> None:
        self._plan = plan
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
                    free.pop() if free else self._plan.buffer(out.width, out.logits)
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
        case SiluMul(out=out, gate=gate) | GeluMul(out=out, gate=gate):
            return [(out, gate)]
        case Linear(parts=parts) if len(parts) == 1:
            return [(parts[0].out, parts[0].residual)]
    return []


def build_plan(tape: Tape) -> Plan:
    """The plan of a recorded forward; its matrices are those of `recorder.matrices_of`."""
    plan = Plan()
    buffers = _Buffers(plan, tape)
    for index, node in enumerate(tape.nodes):
        buffers.place(index, node)
        _emit(plan, buffers, node)
    plan.call("finish", buffers[tape.logits])
    return plan


def _emit(plan: Plan, at: _Buffers, node: Node) -> None:
    match node:
        case Embed(out, weight, scale):
            plan.call("embed", at[out], Matrix(weight.name), scale)
        case Angles(out, spec):
            plan.call("angles", at[out], spec.frequencies().tolist())
        case RmsNorm(out, x, weight, eps):
            plan.call("rms_norm", at[out], at[x], _vector(weight), eps)
        case Rope(out, x, angles, heads):
            plan.call("rope", at[out], at[x], at[angles], heads, x.width // heads)
        case Attention(out, q, k, v, spec):
            plan.call(
                "attention",
                at[out],
                at[q],
                at[k],
                at[v],
                spec.layer,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                spec.scale,
                spec.window,
                at.direct(out),
            )
        case SiluMul(out, gate, up):
            plan.call("silu_mul", at[out], at[gate], at[up])
        case GeluMul(out, gate, up):
            plan.call("gelu_mul", at[out], at[gate], at[up])
        case Add(out, x, y):
            plan.call("add", at[out], at[x], at[y])
        case Gather(out, x):
            plan.call("gather", at[out], at[x])
        case Linear(x, parts):
            plan.call("linear", at[x], [_part(at, part, part.out) for part in parts], at.direct(x))
        case GatedLinear(out, x, gate, up, gelu):
            gates, values = (_part(at, part, out) for part in (gate, up))
            plan.call("gated_linear", at[x], gates, values, gelu, at.direct(out))


def _part(at: _Buffers, part: Part, out: Symbol) -> list[object]:
    residual = -1 if part.residual is None else at[part.residual]
    return [Matrix(part.weight.name), _vector(part.bias), at[out], residual]


def _vector(weight: Weight | None) -> Vector | list[float]:
    if weight is None:
        return []
    return Vector(np.ascontiguousarray(weight.values(), np.float32).reshape(-1))
