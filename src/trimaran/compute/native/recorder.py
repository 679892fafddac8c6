"""A model's forward, recorded once as a list of nodes over symbols.

`Recorder` implements `Ops` on symbols: each call appends a node. Rewrites follow, all of
which leave every number as it is:

    add(x, linear(h))                      ->  linear(h) with residual x
    linear(h, a); linear(h, b); ...        ->  one node, so that h is rounded once and the
                                               threads meet once
    silu_mul(linear(h, a), linear(h, b))   ->  one node that writes only the product; and so
                                               with gelu_mul
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from trimaran.core.errors import BackendError
from trimaran.models.model import Model
from trimaran.models.ops import AttentionSpec, Batch
from trimaran.models.rope import RopeSpec
from trimaran.models.weight import Weight


@dataclass(frozen=True, eq=False)
class Symbol:
    """Rows of `width` elements: one a row of the step, or one a row of the logits."""

    width: int
    logits: bool = False


@dataclass(frozen=True)
class Embed:
    out: Symbol
    weight: Weight
    scale: float = 1.0


@dataclass(frozen=True)
class Angles:
    out: Symbol
    spec: RopeSpec


@dataclass(frozen=True)
class RmsNorm:
    out: Symbol
    x: Symbol
    weight: Weight
    eps: float  # of each part of a row that is as long as the weight


@dataclass(frozen=True)
class Rope:
    out: Symbol
    x: Symbol
    angles: Symbol
    heads: int


@dataclass(frozen=True)
class Attention:
    out: Symbol
    q: Symbol
    k: Symbol
    v: Symbol
    spec: AttentionSpec


@dataclass(frozen=True)
class SiluMul:
    out: Symbol
    gate: Symbol
    up: Symbol


@dataclass(frozen=True)
class GeluMul:
    out: Symbol
    gate: Symbol
    up: Symbol


@dataclass(frozen=True)
class Add:
    out: Symbol
    x: Symbol
    y: Symbol


@dataclass(frozen=True)
class Gather:
    out: Symbol
    x: Symbol


@dataclass(frozen=True)
class Part:
    """One linear layer of a node."""

    out: Symbol
    weight: Weight
    bias: Weight | None = None
    residual: Symbol | None = None


@dataclass(frozen=True)
class Linear:
    x: Symbol
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class GatedLinear:
    """silu or gelu(gate) * up of two layers of one input; the parts' own outputs never exist."""

    out: Symbol
    x: Symbol
    gate: Part
    up: Part
    gelu: bool = False


Product = SiluMul | GeluMul
Node = Embed | Angles | RmsNorm | Rope | Attention | Product | Add | Gather | Linear | GatedLinear


def outputs_of(node: Node) -> tuple[Symbol, ...]:
    return tuple(part.out for part in node.parts) if isinstance(node, Linear) else (node.out,)


def inputs_of(node: Node) -> tuple[Symbol, ...]:
    match node:
        case Embed() | Angles():
            return ()
        case RmsNorm(x=x) | Gather(x=x) | GatedLinear(x=x):
            return (x,)
        case Rope(x=x, angles=angles):
            return (x, angles)
        case Attention(q=q, k=k, v=v):
            return (q, k, v)
        case SiluMul(gate=gate, up=up) | GeluMul(gate=gate, up=up):
            return (gate, up)
        case Add(x=x, y=y):
            return (x, y)
        case Linear(x=x, parts=parts):
            return (x, *(part.residual for part in parts if part.residual is not None))


@dataclass(frozen=True)
class Tape:
    """A recorded forward: nodes in order of execution, and what it returns."""

    nodes: list[Node]
    logits: Symbol


@dataclass
class Recorder:
    """Implements `Ops[Symbol]`."""

    tokens: Symbol
    positions: Symbol
    nodes: list[Node] = field(default_factory=list)
    _angles: dict[RopeSpec, Symbol] = field(default_factory=dict)

    def embed(self, tokens: Symbol, weight: Weight, scale: float = 1.0) -> Symbol:
        if tokens is not self.tokens:
            raise BackendError("a model can embed the step's tokens only")
        out = Symbol(weight.shape[1])
        self.nodes.append(Embed(out, weight, scale))
        return out

    def linear(self, x: Symbol, weight: Weight, bias: Weight | None = None) -> Symbol:
        out = Symbol(weight.shape[0], x.logits)
        self.nodes.append(Linear(x, (Part(out, weight, bias),)))
        return out

    def rms_norm(self, x: Symbol, weight: Weight, eps: float, heads: int = 1) -> Symbol:
        if heads * weight.shape[0] != x.width:
            raise BackendError(f"a norm of {weight.shape[0]} in {heads} parts of {x.width}")
        out = Symbol(x.width, x.logits)
        self.nodes.append(RmsNorm(out, x, weight, eps))
        return out

    def rope(self, x: Symbol, positions: Symbol, heads: int, spec: RopeSpec) -> Symbol:
        if positions is not self.positions:
            raise BackendError("a model can rotate by the step's positions only")
        if spec not in self._angles:
            self._angles[spec] = Symbol(spec.dim)
            self.nodes.append(Angles(self._angles[spec], spec))
        out = Symbol(x.width)
        self.nodes.append(Rope(out, x, self._angles[spec], heads))
        return out

    def attention(self, q: Symbol, k: Symbol, v: Symbol, spec: AttentionSpec) -> Symbol:
        out = Symbol(spec.heads * spec.head_dim)
        self.nodes.append(Attention(out, q, k, v, spec))
        return out

    def silu_mul(self, gate: Symbol, up: Symbol) -> Symbol:
        out = Symbol(gate.width, gate.logits)
        self.nodes.append(SiluMul(out, gate, up))
        return out

    def gelu_mul(self, gate: Symbol, up: Symbol) -> Symbol:
        out = Symbol(gate.width, gate.logits)
        self.nodes.append(GeluMul(out, gate, up))
        return out

    def add(self, x: Symbol, y: Symbol) -> Symbol:
        out = Symbol(x.width, x.logits)
        self.nodes.append(Add(out, x, y))
        return out

    def logits(self, x: Symbol, weight: Weight) -> Symbol:
        picked = Symbol(x.width, logits=True)
        self.nodes.append(Gather(picked, x))
        return self.linear(picked, weight)


def record(model: Model) -> Tape:
    """The model's forward, rewritten as above.

    Raises:
        BackendError: it does what a plan can't, or leaves a weight unused.
    """
    recorder = Recorder(Symbol(1), Symbol(1))
    logits = model.forward(recorder, Batch(recorder.tokens, recorder.positions))
    nodes = fuse_gates(group_linears(fuse_residuals(recorder.nodes, logits)))
    tape = Tape(nodes, logits)
    unused = set(model.weights) - {weight.name for weight in weights_of(tape)}
    if unused:
        raise BackendError(f"the model's forward leaves weights unused: {sorted(unused)[:5]}")
    return tape


def _parts(node: Node) -> tuple[Part, ...]:
    match node:
        case Linear(parts=parts):
            return parts
        case GatedLinear(gate=gate, up=up):
            return (gate, up)
    return ()


def weights_of(tape: Tape) -> list[Weight]:
    """Every weight that the tape reads, in order."""
    found: list[Weight] = []
    for node in tape.nodes:
        if isinstance(node, Embed | RmsNorm):
            found.append(node.weight)
        for part in _parts(node):
            found += [part.weight] + ([part.bias] if part.bias is not None else [])
    return found


def matrices_of(tape: Tape) -> list[Weight]:
    """Those that are packed: of embeddings and linear layers."""
    found: list[Weight] = []
    for node in tape.nodes:
        if isinstance(node, Embed):
            found.append(node.weight)
        found += [part.weight for part in _parts(node)]
    return found


def vocabulary_matrices(tape: Tape) -> set[str]:
    """Names of those with a row a token: of embeddings and of the logits."""
    names = {node.weight.name for node in tape.nodes if isinstance(node, Embed)}
    parts = [part for node in tape.nodes for part in _parts(node)]
    return names | {part.weight.name for part in parts if part.out is tape.logits}


def fuse_residuals(nodes: list[Node], logits: Symbol) -> list[Node]:
    """Sums of something and the linear layer just before, which nothing else reads."""
    uses = Counter(symbol for node in nodes for symbol in inputs_of(node))
    uses[logits] += 1
    fused: list[Node] = []
    for node in nodes:
        last = fused[-1] if fused else None
        if (
            isinstance(node, Add)
            and isinstance(last, Linear)
            and last.parts[0].out is node.y
            and node.x is not node.y
            and uses[node.y] == 1
        ):
            part = replace(last.parts[0], out=node.out, residual=node.x)
            fused[-1] = replace(last, parts=(part,))
        else:
            fused.append(node)
    return fused


def group_linears(nodes: list[Node]) -> list[Node]:
    """Linear layers of one input that follow each other, as one node.

    Its parts are computed in any order, so none may add to what another makes.
    """
    grouped: list[Node] = []
    for node in nodes:
        last = grouped[-1] if grouped else None
        if (
            isinstance(node, Linear)
            and isinstance(last, Linear)
            and last.x is node.x
            and not set(inputs_of(node)) & set(outputs_of(last))
        ):
            grouped[-1] = replace(last, parts=last.parts + node.parts)
        else:
            grouped.append(node)
    return grouped


def fuse_gates(nodes: list[Node]) -> list[Node]:
    """A gate and what it gates, right after their layers, where nothing else reads them."""
    uses = Counter(symbol for node in nodes for symbol in inputs_of(node))
    fused: list[Node] = []
    for node in nodes:
        last = fused[-1] if fused else None
        if (
            isinstance(node, Product)
            and isinstance(last, Linear)
            and [part.out for part in last.parts] == [node.gate, node.up]
            and all(uses[part.out] == 1 and part.residual is None for part in last.parts)
        ):
            fused[-1] = GatedLinear(
                node.out, last.x, last.parts[0], last.parts[1], isinstance(node, GeluMul)
            )
        else:
            fused.append(node)
    return fused
