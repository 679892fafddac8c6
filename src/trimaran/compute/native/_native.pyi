"""What csrc/*_bindings.cpp export."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Bytes = npt.NDArray[np.uint8]

class SamplerError(Exception): ...

KERNEL_VERSION: int
SOURCE_HASH: str

def available_isas() -> list[str]: ...
def check_isa(name: str) -> None: ...
def probe_names(isa: str) -> list[str]: ...
def probe_operations(
    isa: str, name: str, threads: int, samples: int, seconds: float
) -> list[float]: ...
def probe_reads(
    isa: str, bytes: int, threads: int, samples: int, seconds: float
) -> list[float]: ...

class PackedLinear:
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def values(self, out: _Float32) -> None: ...

class WeightMemory:
    def __init__(self, bytes: int) -> None: ...
    def array(self) -> _Bytes: ...

def checksum(data: _Bytes) -> int: ...
def packed_layout(packed: PackedLinear) -> dict[str, int]: ...
def packed_bytes(packed: PackedLinear) -> _Bytes: ...
def packed_from(
    memory: WeightMemory,
    at: int,
    format: str,
    codes: int,
    outputs: int,
    inputs: int,
    group: int,
    offset: int,
    mins: bool,
    scales: int,
    block_bytes: int,
    scales_at: int,
    mins_at: int,
) -> PackedLinear: ...

# (weight, bias or [], buffer, residual's buffer or -1)
_Part = tuple[PackedLinear, Sequence[float], int, int]

def packable(type: str) -> bool: ...
def pack(
    type: str, rows: _Bytes, inputs: int, order: _Int64 | None, target: str, isa: str
) -> PackedLinear: ...
def linear(
    isa: str,
    weight: PackedLinear,
    x: _Float32,
    bias: _Float32 | None,
    residual: _Float32 | None,
    out: _Float32,
    activations: str = "auto",
) -> None: ...
def rms_norm(isa: str, x: _Float32, weight: _Float32, eps: float, out: _Float32) -> None: ...
def rope(isa: str, heads: _Float32, cosines: _Float32, sines: _Float32) -> None: ...
def silu_mul(isa: str, gate: _Float32, up: _Float32, out: _Float32) -> None: ...
def gelu_mul(isa: str, gate: _Float32, up: _Float32, out: _Float32) -> None: ...
def add(isa: str, a: _Float32, b: _Float32, out: _Float32) -> None: ...
def attend(
    isa: str,
    threads: int,
    q: _Float32,
    k: _Float32,
    v: _Float32,
    k_cache: npt.NDArray[np.uint16],
    v_cache: npt.NDArray[np.uint16],
    positions: _Int32,
    slots: _Int32,
    row_starts: _Int32,
    contexts: _Int32,
    block_tables: _Int32,
    scale: float,
    out: _Float32,
    out_bf16: _Bytes | None = None,
    grouped: bool = True,
    kv: str = "bf16",
    window: int = 0,
) -> None: ...
def prefix_groups(
    positions: _Int32,
    row_starts: _Int32,
    block_tables: _Int32,
    block_size: int,
    most_rows: int,
) -> tuple[list[tuple[list[int], int, int]], list[int]]: ...
def copy_block(cache: npt.NDArray[np.uint16], source: int, target: int) -> None: ...
def meet(threads: int, rounds: int, fail: int = -1) -> bool: ...

class Program:
    def __init__(self) -> None: ...
    def buffer(self, width: int, logits: bool) -> int: ...
    def embed(self, out: int, weight: PackedLinear, scale: float) -> None: ...
    def angles(self, out: int, frequencies: Sequence[float]) -> None: ...
    def rms_norm(self, out: int, a: int, weight: Sequence[float], eps: float) -> None: ...
    def rope(self, out: int, a: int, angles: int, heads: int, head_dim: int) -> None: ...
    def attention(
        self,
        out: int,
        q: int,
        k: int,
        v: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        direct: bool,
    ) -> None: ...
    def silu_mul(self, out: int, gate: int, up: int) -> None: ...
    def gelu_mul(self, out: int, gate: int, up: int) -> None: ...
    def add(self, out: int, a: int, b: int) -> None: ...
    def gather(self, out: int, a: int) -> None: ...
    def linear(self, a: int, parts: Sequence[_Part], direct_input: bool) -> None: ...
    def gated_linear(self, a: int, gate: _Part, up: _Part, gelu: bool, direct: bool) -> None: ...
    def finish(self, logits: int) -> None: ...

class ThreadPool: ...

class Executor:
    def __init__(
        self,
        program: Program,
        isa: str,
        threads: int,
        max_rows: int,
        kv: str = "bf16",
        activations: str = "auto",
    ) -> None: ...
    def allocate_cache(self, blocks: Sequence[int], block_size: int) -> None: ...
    def run(
        self,
        tokens: _Int32,
        positions: _Int32,
        slots: _Int32,
        row_starts: _Int32,
        contexts: _Int32,
        block_tables: _Int32,
        logit_rows: _Int32,
        copies: _Int32,
        more: Sequence[tuple[_Int32, _Int32, _Int32]] = (),
        pooled: tuple[_Int32, _Float64] | None = None,
    ) -> _Float32: ...
    def read_blocks(self, blocks: _Int32, out: _Bytes) -> None: ...
    def write_blocks(self, blocks: _Int32, data: _Bytes) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    def group_prefixes(self, on: bool) -> None: ...
    def time_phases(self, on: bool) -> None: ...
    def phase_seconds(self) -> list[tuple[str, float]]: ...
    @property
    def pool(self) -> ThreadPool: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...

class Sampler:
    def __init__(self, isa: str, pool: ThreadPool | None = None) -> None: ...
    def choose(
        self,
        logits: _Float32,
        rows: _Int32,
        temperature: _Float32,
        top_k: _Int32,
        top_p: _Float32,
        min_p: _Float32,
        uniforms: _Float64,
        adjust_starts: _Int32,
        adjust_ids: _Int32,
        adjust_bias: _Float32,
        adjust_repetition: _Float32,
        adjust_penalty: _Float32,
        tokens: _Int32,
    ) -> None: ...
    def score(
        self,
        logits: _Float32,
        rows: _Int32,
        tokens: _Int32,
        logprobs: _Float32,
        ranks: _Int32,
        top_ids: _Int32,
        top_logprobs: _Float32,
    ) -> None: ...
