"""What the engine asks of a back end."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trimaran.core.sampling_batch import Float32, Sampler
from trimaran.core.step_plan import StepPlan

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

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache, replacing a former one.

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

    def run(self, plan: StepPlan) -> Float32:
        """Executes a step: copies blocks, writes K and V, returns logits [R, vocab].

        The array may be overwritten by the next call. Not thread-safe.

        Raises:
            BackendError: the step failed; the cache of its sequences is not to be used.
        """
        ...

    def close(self) -> None:
        """Frees memory and threads; may be called twice."""
        ...
