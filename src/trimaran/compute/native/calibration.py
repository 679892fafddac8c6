"""What this machine gives right now: read bandwidth by size, arithmetic by instruction set.

They are the limits of a model's speed. A decode step reads every weight and the KV of its
contexts once, so it can't take less than their bytes / bandwidth; a prefill can't take less
than its operations / peak. Where other work shares the machine, every sample is a lower
bound: the highest is the nearest to the hardware, and the median to what is to be had now.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimaran.compute.native import _native

READ_BYTES = (1 << 20, 8 << 20, 32 << 20, 128 << 20, 1 << 30)
_SAMPLES = 7
_READ_SECONDS = 0.01
_OPERATION_SECONDS = 0.006


@dataclass(frozen=True, slots=True)
class Rate:
    """Of several samples, in 1e9 a second."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Rate:
        """From amounts a second."""
        return cls(statistics.median(samples) / 1e9, min(samples) / 1e9, max(samples) / 1e9)


@dataclass(frozen=True, slots=True)
class Reading:
    """How fast `threads` threads read a buffer of `bytes` bytes again and again, GB/s."""

    bytes: int
    threads: int
    rate: Rate


@dataclass(frozen=True, slots=True)
class Peak:
    """Operations on registers (a multiplication and its addition are two), GOP/s.

    Attributes:
        type: of the operands: "int8" (sums in int32), "bf16" (in float32) or "f32".
    """

    isa: str
    type: str
    threads: int
    rate: Rate


@dataclass(frozen=True, slots=True)
class Calibration:
    """Every rate, with one thread and with all."""

    threads: int
    reads: tuple[Reading, ...]
    peaks: tuple[Peak, ...]

    def bandwidth(self, size: int) -> float:
        """GB/s, the highest, at which all threads read `size` bytes.

        Between the sizes measured it is interpolated over the logarithm of the size; beyond
        them it is that of the nearest.
        """
        points = sorted((r.bytes, r.rate.highest) for r in self.reads if r.threads == self.threads)
        below = [point for point in points if point[0] <= size] or points[:1]
        above = [point for point in points if point[0] >= size] or points[-1:]
        (low, slow), (high, fast) = below[-1], above[0]
        if low == high:
            return slow
        share = math.log(size / low) / math.log(high / low)
        return slow + share * (fast - slow)

    def peak(self, type: str) -> float:
        """GOP/s, the highest, of all threads in the fastest instruction set; 0 if none."""
        rates = (p.rate.highest for p in self.peaks if (p.type, p.threads) == (type, self.threads))
        return max(rates, default=0.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Calibration:
        """From what `to_json` gave, as JSON keeps it."""
        return cls(
            values["threads"],
            tuple(Reading(**(r | {"rate": Rate(**r["rate"])})) for r in values["reads"]),
            tuple(Peak(**(p | {"rate": Rate(**p["rate"])})) for p in values["peaks"]),
        )


def calibrate(threads: int, sizes: Iterable[int] = (), available: int | None = None) -> Calibration:
    """Measures everything; takes two or three seconds on an idle machine.

    Args:
        sizes: bytes of buffers to read besides READ_BYTES, such as a model's weights.
        available: bytes of memory that are free; buffers over a quarter of it are left out.

    Raises:
        MemoryError: a buffer can't be had.
    """
    isas = _native.available_isas()
    counts = sorted({1, threads})
    room = None if available is None else available // 4
    wanted = sorted({*READ_BYTES, *sizes})
    reads = [
        Reading(size, count, Rate.of(_read(isas[-1], size, count)))
        for size in wanted
        if room is None or size <= max(room, READ_BYTES[0])
        for count in counts
    ]
    peaks = [
        Peak(isa, type, count, Rate.of(_operate(isa, type, count)))
        for isa in isas
        for type in _native.probe_names(isa)
        for count in counts
    ]
    return Calibration(threads, tuple(reads), tuple(peaks))


def _read(isa: str, size: int, threads: int) -> list[float]:
    return _native.probe_reads(isa, size, threads, _SAMPLES, _READ_SECONDS)


def _operate(isa: str, type: str, threads: int) -> list[float]:
    return _native.probe_operations(isa, type, threads, _SAMPLES, _OPERATION_SECONDS)


@dataclass(frozen=True, slots=True)
class Limits:
    """What no engine could surpass on this machine with a model in these formats.

    Attributes:
        bandwidth: GB/s at which bytes as many as the weights are read.
        decode_tokens_per_second: of one sequence at a short context: bandwidth / weights.
        decode_at_context: the same with `context` tokens in the KV cache.
        prefill_tokens_per_second: peak / operations a token in the linear layers; with
            integers the kernels' activations count as one product of 8 bits.
    """

    bandwidth: float
    decode_tokens_per_second: float
    context: int
    decode_at_context: float
    prefill_tokens_per_second: float


def limits(
    calibration: Calibration,
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    linear_parameters: int,
    bf16: bool,
    context: int,
) -> Limits:
    """Of a loaded model.

    Args:
        linear_parameters: elements of all matrices that a prompt's token is multiplied by.
        bf16: whether the weights are held, and multiplied, in bf16.
        context: tokens of the longest sequence.
    """
    bandwidth = calibration.bandwidth(weight_bytes)
    full = weight_bytes + context * kv_bytes_per_token
    types = ("bf16", "f32") if bf16 else ("int8", "f32")
    peak = next((rate for rate in map(calibration.peak, types) if rate), 0.0)
    return Limits(
        bandwidth,
        bandwidth * 1e9 / weight_bytes,
        context,
        calibration.bandwidth(full) * 1e9 / full,
        peak * 1e9 / (2 * linear_parameters),
    )
