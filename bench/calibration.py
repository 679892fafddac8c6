"""What the machine gives right now: read bandwidth and arithmetic, in numpy.

A figure from a shared machine means little without the state the machine was in. These
loops run before and after a measurement: where they differ by much, so may the figures.
They are lower bounds of the hardware's limits, for numpy doesn't reach those.

    python bench/calibration.py [--threads N] [--weight-bytes N]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# One product a thread below: a library that used more would be counted twice.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt

CACHED_BYTES = 32 << 20
MEMORY_BYTES = 1 << 30


def cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def best_rate(work: Callable[[], object], amount: float, repeats: int = 5) -> float:
    """`amount` a second in the fastest of `repeats` runs: noise only ever slows."""
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return amount / fastest


def read_bandwidth(size: int, threads: int) -> float:
    """GB/s at which `threads` threads read one buffer of `size` bytes, over and over."""
    parts = np.array_split(np.ones(size // 8, np.int64), threads)
    passes = max(1, (256 << 20) // size)

    def reduce(part: npt.NDArray[np.int64]) -> None:
        for _ in range(passes):
            np.add.reduce(part)

    with ThreadPoolExecutor(threads) as pool:
        return best_rate(lambda: list(pool.map(reduce, parts)), passes * size / 1e9)


def float_rate(threads: int) -> float:
    """GFLOP/s of float32 matrix products, one a thread."""
    size = 512
    pairs = [(np.ones((size, size), np.float32),) * 2 for _ in range(threads)]

    def multiply(pair: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]) -> None:
        for _ in range(4):
            np.matmul(*pair)

    with ThreadPoolExecutor(threads) as pool:
        work = 4 * threads * 2 * size**3 / 1e9
        return best_rate(lambda: list(pool.map(multiply, pairs)), work)


def int8_rate(threads: int) -> float:
    """G additions/s of int8 in the first-level cache."""
    rounds, size = 2000, 24576
    arrays = [np.ones(size, np.int8) for _ in range(threads)]

    def add(array: npt.NDArray[np.int8]) -> None:
        for _ in range(rounds):
            np.add(array, array, out=array)

    with ThreadPoolExecutor(threads) as pool:
        return best_rate(lambda: list(pool.map(add, arrays)), rounds * size * threads / 1e9)


def calibrate(threads: int, weight_bytes: int) -> dict[str, float]:
    """All rates; takes about two seconds.

    Args:
        weight_bytes: size of the model that is measured: a buffer as large is read too.
    """
    return {
        "read_cached_gb_s": read_bandwidth(CACHED_BYTES, threads),
        "read_weights_gb_s": read_bandwidth(weight_bytes, threads),
        "read_memory_gb_s": read_bandwidth(MEMORY_BYTES, threads),
        "float32_gflop_s": float_rate(threads),
        "int8_gop_s": int8_rate(threads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=cpus())
    parser.add_argument("--weight-bytes", type=int, default=96 << 20)
    args = parser.parse_args()
    print(json.dumps(calibrate(args.threads, args.weight_bytes), indent=2))


if __name__ == "__main__":
    main()
