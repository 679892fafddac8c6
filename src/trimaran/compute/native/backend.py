"""The native back end: a recorded plan, packed weights and a paged cache, all in C++."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.compute.backend import Bytes, Int32, blocks_by_group, no_memory
from trimaran.compute.native import _native
from trimaran.compute.native.built import BuiltModel, build
from trimaran.compute.native.sampler import NativeSampler
from trimaran.compute.processors import usable_processors
from trimaran.core.config import ACTIVATIONS, KV_FORMATS
from trimaran.core.errors import BackendError, CapacityError
from trimaran.core.sampling_batch import Float32
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.models.layer_groups import LayerGroup, layer_groups
from trimaran.models.model import Model

_SCALE_BYTES = 4  # of an int8 cache: a float32 for each token and KV head


def available_isas() -> list[str]:
    """Instruction sets whose kernels can run here, the slowest first."""
    return _native.available_isas()


class NativeBackend:
    """Runs a model's recorded forward in one call a step; implements `Backend`.

    Activations between operations are float32. Linear layers round their input to 12 bits a
    row, or to 8 in groups of 32, and sum exactly where weights have 4 or 8 bits and the machine
    has no AMX, and to bf16 otherwise; csrc/linear.h and csrc/attention.h state the
    arithmetic. The KV cache is in bf16, or in int8 with a scale for each token and KV head
    (csrc/kv_cache.h).
    """

    def __init__(
        self,
        model: Model | BuiltModel,
        *,
        weights: str = "as-is",
        kv: str = "bf16",
        activations: str = "auto",
        isa: str = "auto",
        threads: int = 0,
        max_rows: int = 2048,
    ) -> None:
        """Packs the weights and starts the threads.

        Args:
            model: one that is built has its weights and its instruction set already.
            weights: "as-is", "bf16", "int8" or "int4", as in `EngineConfig`.
            kv: "bf16" or "int8", as in `EngineConfig`.
            activations: "auto" or "int8", as in `EngineConfig`.
            isa: "auto" or one of `available_isas`.
            threads: 0 takes the processors this process may use (`usable_processors`).
            max_rows: rows of a step, at most; memory for activations is sized by it.

        Raises:
            BackendError: the machine lacks the instruction set, or the kernels can't work
                with the model's dimensions.
            CapacityError: the memory for the weights can't be had.
        """
        if max_rows < 1 or threads < 0:
            raise BackendError(f"max_rows is {max_rows} and threads {threads}; both must be more")
        if kv not in KV_FORMATS:
            raise BackendError(f"kv is '{kv}'; give one of {', '.join(KV_FORMATS)}")
        if activations not in ACTIVATIONS:
            raise BackendError(
                f"activations is '{activations}'; give one of {', '.join(ACTIVATIONS)}"
            )
        self._kv = kv
        self._activations = activations
        self._block_size = 0
        self._threads = threads or usable_processors()
        if not isinstance(model, BuiltModel):
            model = build(model, weights, isa, self._threads)
        self._built: BuiltModel | None = model
        self._isa = model.isa
        self._weights = model.weights
        self._weight_bytes = model.nbytes
        self._config = model.config
        self._executor: _native.Executor | None = self._start(model, max_rows)
        self._formats = Counter(matrix.format for matrix in model.matrices.values())
        self._linear_parameters = sum(
            matrix.outputs * matrix.inputs
            for matrix in model.matrices.values()
            if matrix.outputs != model.config.vocab_size  # only rows that sample have logits
        )
        self.sampler = NativeSampler(self._isa, self._executor.pool)

    def _start(self, built: BuiltModel, max_rows: int) -> _native.Executor:
        try:
            program = built.plan.program(built.matrices)
            return _native.Executor(
                program, self._isa, self._threads, max_rows, self._kv, self._activations
            )
        except ValueError as error:
            raise BackendError(f"the native kernels can't run this model: {error}") from None
        except MemoryError:
            raise CapacityError(
                f"there isn't enough memory for the activations of {max_rows} rows; lower"
                " max_num_batched_tokens"
            ) from None
        except RuntimeError as error:
            raise BackendError(
                f"{self._threads} threads can't be started: {error}; lower threads"
            ) from None

    def describe(self) -> dict[str, Any]:
        executor = self._executor
        return {
            "backend": "native",
            "isa": self._isa,
            "available_isas": available_isas(),
            "threads": self._threads,
            "weights": self._weights,
            "weight_formats": dict(self._formats),
            "kv": self._kv,
            "activations": self._activations,
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "weight_bytes": self._weight_bytes,
            "linear_parameters": self._linear_parameters,
            "activation_bytes": executor.activation_bytes if executor else 0,
            "kv_cache_bytes": executor.cache_bytes if executor else 0,
        }

    def kv_bytes_per_token(self) -> int:
        config = self._config
        head = config.head_dim + _SCALE_BYTES if self._kv == "int8" else 2 * config.head_dim
        return 2 * config.num_layers * config.num_kv_heads * head

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self._config)

    def allocate_cache(self, num_blocks: int | Sequence[int], block_size: int) -> None:
        """Makes the KV cache. Memory is taken from the system as blocks are first written.

        Raises:
            CapacityError: the memory can't be had.
            BackendError: the kernels don't know the block size.
        """
        counts = blocks_by_group(num_blocks, self.layer_groups())
        try:
            self._open().allocate_cache(counts, block_size)
            self._block_size = block_size
        except MemoryError:
            raise no_memory(self, counts, block_size) from None
        except ValueError as error:
            raise BackendError(f"{error} (block_size is {block_size})") from None

    def kv_block_bytes(self) -> int:
        return self._executor.block_bytes if self._executor is not None else 0

    def kv_fingerprint(self) -> bytes:
        plan, vectors = self.built.plan.to_json()
        head = [_native.KERNEL_VERSION, _native.SOURCE_HASH, self._isa, self._kv, plan]
        head += [self._activations, self._block_size, self.kv_block_bytes()]
        digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
        for vector in vectors:
            digest.update(vector.tobytes())
        for name, matrix in self.built.matrices.items():
            checksum = _native.checksum(_native.packed_bytes(matrix))
            digest.update(f"{name} {matrix.format} {checksum:016x}\n".encode())
        return digest.digest()

    def read_blocks(self, blocks: Int32, out: Bytes) -> None:
        _copy_blocks(self._open().read_blocks, blocks, out)

    def write_blocks(self, blocks: Int32, data: Bytes) -> None:
        _copy_blocks(self._open().write_blocks, blocks, data)

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        executor = self._open()
        try:
            return executor.run(
                plan.tokens,
                plan.positions,
                plan.slots,
                plan.row_starts,
                plan.contexts,
                plan.block_tables,
                plan.logit_rows,
                plan.copies,
                [(tables.slots, tables.block_tables, tables.copies) for tables in plan.more],
                None if pooled is None else (pooled.rows, pooled.sums),
            )
        except ValueError as error:
            raise BackendError(str(error)) from None
        except TypeError:
            raise BackendError(
                "step plan: an array isn't C-contiguous int32 of the dimensions of StepPlan, or"
                " rows and sums to pool aren't as in PooledRows"
            ) from None
        except MemoryError:
            raise BackendError(
                f"there isn't enough memory for a step of {plan.rows} rows,"
                f" {len(plan.logit_rows)} of them with logits; lower max_num_batched_tokens"
            ) from None
        except RuntimeError as error:  # of a process that was forked
            raise BackendError(str(error)) from None

    def group_prefixes(self, on: bool) -> None:
        """Whether attention reads pages that several sequences of a step hold once for all of
        them, as it does from the start. Changes no result."""
        self._open().group_prefixes(on)

    def time_phases(self, on: bool) -> None:
        """Switches the timing of a step's phases on, from zero, or off."""
        self._open().time_phases(on)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by kind of phase ("rows", "attention", "linear 576 -> 960") since then."""
        seconds: Counter[str] = Counter()
        for name, value in self._open().phase_seconds():
            seconds[name] += value  # type: ignore[assignment]
        return dict(seconds)

    @property
    def built(self) -> BuiltModel:
        """What it runs, to be kept for another start.

        Raises:
            BackendError: it was closed.
        """
        if self._built is None:
            raise BackendError("the back end was closed")
        return self._built

    def close(self) -> None:
        self._executor = self._built = None
        self.sampler = NativeSampler(self._isa)  # which holds no threads

    def _open(self) -> _native.Executor:
        if self._executor is None:
            raise BackendError("the back end was closed")
        return self._executor


def _copy_blocks(copy: Callable[[Int32, Bytes], None], blocks: Int32, data: Bytes) -> None:
    try:
        copy(blocks, data)
    except ValueError as error:
        raise BackendError(str(error)) from None
    except TypeError:
        raise BackendError(
            f"KV blocks: {blocks.dtype} {list(blocks.shape)} numbers and {data.dtype}"
            f" {list(data.shape)} data; give C-contiguous int32 [N] and uint8 [N, bytes]"
        ) from None
