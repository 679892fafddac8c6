"""What `trimaran info --calibrate` measures, and what it says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trimaran.core.errors import BackendError, CapacityError

if TYPE_CHECKING:
    from trimaran.compute.native.calibration import Calibration, Limits, Rate

_MIB = 2**20


def measure(about: Mapping[str, Any]) -> Calibration:
    """The machine's rates; with a loaded model also the reading of as much as its weights.

    Args:
        about: of `info`: "threads", "memory_available", and "model" if there is one.

    Raises:
        BackendError: the loops weren't compiled here.
        CapacityError: there is too little memory to read from.
    """
    from trimaran.compute import native

    if not native.is_available():
        raise BackendError(
            f"--calibrate needs the native kernels: {native.unavailable_reason()}; install a C++"
            " compiler and reinstall"
        )
    from trimaran.compute.native.calibration import calibrate

    backend = about.get("model", {}).get("backend", {})
    threads, sizes = about["threads"], []
    if "linear_parameters" in backend:
        threads, sizes = backend["threads"], [backend["weight_bytes"]]
    try:
        return calibrate(threads, sizes, about["memory_available"])
    except MemoryError:
        raise CapacityError("there isn't enough free memory to measure its bandwidth") from None


def model_limits(calibration: Calibration, model: Mapping[str, Any]) -> Limits | None:
    """Of a loaded model, or None for a back end whose weights aren't packed."""
    from trimaran.compute.native.calibration import limits

    backend = model["backend"]
    if "linear_parameters" not in backend:
        return None
    return limits(
        calibration,
        weight_bytes=backend["weight_bytes"],
        kv_bytes_per_token=backend["kv_bytes_per_token"],
        linear_parameters=backend["linear_parameters"],
        bf16=set(backend["weight_formats"]) == {"bf16"},
        context=model["max_model_len"],
    )


def lines(calibration: Calibration, found: Limits | None) -> Iterator[str]:
    """The report: medians, with the lowest and highest of the samples."""
    yield "calibration              median (lowest to highest) of several samples"
    for reading in calibration.reads:
        name = f"read {reading.bytes / _MIB:,.0f} MiB"
        yield _line(name, reading.threads, reading.rate, "GB/s")
    for peak in calibration.peaks:
        yield _line(f"{peak.isa} {peak.type}", peak.threads, peak.rate, "GOP/s")
    if found is not None:
        yield from _limit_lines(found)


def _line(name: str, threads: int, rate: Rate, unit: str) -> str:
    digits = 1 if unit == "GB/s" else 0
    low, middle, high = (
        f"{value:,.{digits}f}" for value in (rate.lowest, rate.median, rate.highest)
    )
    label = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
    return f"  {label:<28} {middle:>8} {unit} ({low} to {high})"


def _limit_lines(found: Limits) -> Iterator[str]:
    yield "limits of this model     nothing that reads all weights each step can be faster"
    yield (
        f"  {'decode, one sequence':<28} {found.decode_tokens_per_second:>8,.0f} tokens/s:"
        f" {found.bandwidth:.1f} GB/s over the bytes of the weights"
    )
    yield (
        f"  {f'at {found.context:,} tokens':<28} {found.decode_at_context:>8,.0f} tokens/s:"
        " with the KV cache read as well"
    )
    yield (
        f"  {'prefill':<28} {found.prefill_tokens_per_second:>8,.0f} tokens/s:"
        " the peak over the operations of the linear layers"
    )
