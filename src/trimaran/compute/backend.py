"""What the engine asks of a back end."""

from __future__ import annotations

from typing import Any, Protocol

from trimaran.core.sampling_batch import Float32, Sampler
from trimaran.core.step_plan import StepPlan


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
