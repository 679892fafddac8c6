"""Recording a forward, rewriting it, and placing its symbols in buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny import ArrayStorage, tiny_model

from trimaran.compute.native import program as placing
from trimaran.compute.native.recorder import (
    Add,
    Attention,
    Embed,
    GatedLinear,
    Gather,
    GeluMul,
    Linear,
    Node,
    Recorder,
    RmsNorm,
    Rope,
    SiluMul,
    Symbol,
    Tape,
    fuse_gates,
    fuse_residuals,
    group_linears,
    inputs_of,
    outputs_of,
    record,
)
from trimaran.core.errors import BackendError
from trimaran.models.weight import Weight


def weight(outputs: int, inputs: int = 8) -> Weight:
    return Weight("w", (outputs, inputs), ArrayStorage(np.zeros((outputs, inputs), np.float32)))


def test_a_decoder_becomes_the_fused_plan() -> None:
    tape = record(tiny_model(num_layers=3))
    kinds = Counter(type(node) for node in tape.nodes)
    assert kinds[Attention] == 3
    assert kinds[GatedLinear] == 3
    assert kinds[Add] == kinds[SiluMul] == 0
    linears = [node for node in tape.nodes if isinstance(node, Linear)]
    assert [len(node.parts) for node in linears] == [3, 1, 1] * 3 + [1]
    assert sum(node.parts[0].residual is not None for node in linears) == 6


def test_every_symbol_is_made_before_it_is_read() -> None:
    tape = record(tiny_model())
    made: set[Symbol] = set()
    for node in tape.nodes:
        assert set(inputs_of(node)) <= made
        made |= set(outputs_of(node))
    assert tape.logits in made


def test_a_sum_that_is_read_twice_is_not_fused() -> None:
    tokens, positions = Symbol(1), Symbol(1)
    ops = Recorder(tokens, positions)
    x = ops.embed(tokens, weight(20))
    y = ops.linear(x, weight(8))
    total = ops.add(ops.add(x, y), y)
    nodes = fuse_residuals(ops.nodes, ops.logits(total, weight(20)))
    assert sum(isinstance(node, Add) for node in nodes) == 2


def test_a_layer_that_adds_to_another_is_not_grouped_with_it() -> None:
    tokens, positions = Symbol(1), Symbol(1)
    ops = Recorder(tokens, positions)
    x = ops.embed(tokens, weight(20))
    ops.logits(ops.add(ops.linear(x, weight(8)), ops.linear(x, weight(8))), weight(20))
    nodes = group_linears(fuse_residuals(ops.nodes, Symbol(20)))
    assert [len(node.parts) for node in nodes if isinstance(node, Linear)] == [1, 1, 1]


def test_a_forward_that_leaves_a_weight_unused_is_refused() -> None:
    model = tiny_model()

    lazy: Any = SimpleNamespace(
        config=model.config,
        weights={**model.weights, "spare": weight(4)},
        forward=model.forward,
    )
    with pytest.raises(BackendError, match="spare"):
        record(lazy)


def test_inputs_that_a_plan_does_not_have_are_refused() -> None:
    ops = Recorder(Symbol(1), Symbol(1))
    with pytest.raises(BackendError, match="tokens"):
        ops.embed(Symbol(1), weight(20))


@dataclass
class FakeProgram:
    """Hands out numbers, and remembers the shape of each buffer."""

    shapes: list[tuple[int, bool]] = field(default_factory=list)

    def buffer(self, width: int, logits: bool) -> int:
        self.shapes.append((width, logits))
        return len(self.shapes) - 1


@st.composite
def tapes(draw: st.DrawFn) -> Tape:
    """Random operations on random earlier symbols of one width."""
    tokens, positions = Symbol(1), Symbol(1)
    ops = Recorder(tokens, positions)
    known = [ops.embed(tokens, weight(20))]
    for _ in range(draw(st.integers(1, 30))):
        x, y = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        match draw(st.sampled_from("nhlasg")):
            case "n":
                known.append(ops.rms_norm(x, weight(8), 1e-5))
            case "h":
                known.append(ops.rms_norm(x, weight(4), 1e-5, heads=2))
            case "g":
                known.append(ops.gelu_mul(x, y))
            case "l":
                known.append(ops.linear(x, weight(8)))
            case "a":
                known.append(ops.add(x, y))
            case "s":
                known.append(ops.silu_mul(x, y))
    logits = ops.logits(known[-1], weight(20))
    return Tape(fuse_gates(group_linears(fuse_residuals(ops.nodes, logits))), logits)


def may_overwrite(node: Node, out: Symbol, over: Symbol) -> bool:
    """Operations that read an element before they write the same one."""
    match node:
        case RmsNorm() | Rope() | Add() | SiluMul() | GeluMul():
            return over in inputs_of(node)
        case Linear(parts=parts):
            return any(part.out is out and part.residual is over for part in parts)
    return False


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tapes())
def test_no_buffer_is_written_while_it_is_needed(tape: Tape) -> None:
    buffers = placing._Buffers(FakeProgram(), tape)  # type: ignore[arg-type]
    last_read: dict[Symbol, int] = {tape.logits: len(tape.nodes)}
    for index, node in enumerate(tape.nodes):
        for symbol in inputs_of(node):
            last_read[symbol] = max(index, last_read.get(symbol, 0))
    held: dict[int, Symbol] = {}
    for index, node in enumerate(tape.nodes):
        buffers.place(index, node)
        for symbol in inputs_of(node):
            assert held[buffers[symbol]] is symbol
        written = [buffers[out] for out in outputs_of(node)]
        assert len(set(written)) == len(written)
        for out, number in zip(outputs_of(node), written, strict=True):
            before = held.get(number)
            if before is not None and last_read.get(before, -1) >= index:
                assert last_read[before] == index
                assert may_overwrite(node, out, before)
            held[number] = out
    assert held[buffers[tape.logits]] is tape.logits


def test_a_decoder_needs_few_buffers() -> None:
    program = FakeProgram()
    tape = record(tiny_model(num_layers=6))
    buffers = placing._Buffers(program, tape)  # type: ignore[arg-type]
    for index, node in enumerate(tape.nodes):
        buffers.place(index, node)
    shallow = FakeProgram()
    tape = record(tiny_model(num_layers=2))
    buffers = placing._Buffers(shallow, tape)  # type: ignore[arg-type]
    for index, node in enumerate(tape.nodes):
        buffers.place(index, node)
    assert len(program.shapes) == len(shallow.shapes) <= 10
    assert isinstance(tape.nodes[0], Embed)
    assert isinstance(tape.nodes[-2], Gather)
