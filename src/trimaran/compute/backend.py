"""What the engine asks of a back end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trimaran.core.errors import BackendError, CapacityError
from trimaran.core.sampling_batch import Float32, Sampler
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.models.layer_groups import LayerGroup

Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class Backend(Protocol):
    """Executes steps over a paged KV cache that it owns.

    A request's logits are bit for bit the same whatever else is in the step, however its
    prompt was chunked, whatever the block size and the number of threads.
    """

    @property
    def sampler(self) -> Sampler: ...

    def describe(self) -> dict[str, Any]:
        """Name, instruction set, threads, weight and KV types, kernels, bytes held: plain
        JSON values, for `trimaran info` and logs."""
        ...

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        ...

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The model's layers, grouped as their keys and values are held; a step's plan has
        block tables for each group, in this order, or one for all of them."""
        ...

    def allocate_cache(self, num_blocks: int | Sequence[int], block_size: int) -> None:
        """Makes the KV cache, replacing a former one.

        Args:
            num_blocks: of each group of layers, or one number for all of them.

        Raises:
            CapacityError: the memory can't be had.
        """
        ...

    def kv_block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers; 0 before `allocate_cache`."""
        ...

    def kv_fingerprint(self) -> bytes:
        """32 bytes that change with whatever changes the bits of K and V, or how they lie in a
        block: weights, kernels, KV format, dimensions, block size. Reads all weights."""
        ...

    def read_blocks(self, blocks: Int32, out: Bytes) -> None:
        """Copies whole blocks out of the cache.

        May be called from another thread while `run` is at work. What is read of a block that
        is written at the same time is undefined: whoever can't exclude that must find out
        afterwards.

        Args:
            blocks: [N] which.
            out: uint8 [N, kv_block_bytes], C-contiguous.

        Raises:
            BackendError: there is no such block, or `out` has another shape.
        """
        ...

    def write_blocks(self, blocks: Int32, data: Bytes) -> None:
        """Copies whole blocks into the cache, as `read_blocks` has read them.

        May be called from another thread while `run` is at work on other blocks.

        Args:
            blocks: [N] which; no step that runs may read or write them.
            data: uint8 [N, kv_block_bytes], C-contiguous.

        Raises:
            BackendError: there is no such block, or `data` has another shape.
        """
        ...

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        """Executes a step: copies blocks, writes K and V, returns logits [R, vocab].

        The array may be overwritten by the next call. Not thread-safe.

        Args:
            pooled: rows that are added to sums: what the logits would be made of.

        Raises:
            BackendError: the step failed; the cache of its sequences is not to be used.
        """
        ...

    def close(self) -> None:
        """Frees memory and threads; may be called twice."""
        ...


def blocks_by_group(num_blocks: int | Sequence[int], groups: Sequence[LayerGroup]) -> list[int]:
    """Blocks of each group, of what `allocate_cache` is given.

    Raises:
        BackendError: it is for another number of groups.
    """
    counts = [num_blocks] * len(groups) if isinstance(num_blocks, int) else list(num_blocks)
    if len(counts) != len(groups):
        raise BackendError(
            f"a KV cache for {len(counts)} groups of layers; the model has {len(groups)}"
        )
    return counts


def no_memory(backend: Backend, counts: Sequence[int], block_size: int) -> CapacityError:
    """The error for a KV cache whose memory can't be had."""
    groups = backend.layer_groups()
    layers = sum(len(group.layers) for group in groups)
    tokens = sum(n * len(group.layers) for n, group in zip(counts, groups, strict=True))
    size = tokens * block_size * backend.kv_bytes_per_token() // layers
    return CapacityError(
        f"the KV cache of {' + '.join(map(str, counts))} blocks needs {size} bytes, which can't"
        " be had; lower kv_cache_bytes or kv_memory_fraction"
    )
