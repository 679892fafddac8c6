"""The arithmetic that csrc/linear.h states, in numpy: products to the last bit.

Codes and scales are read from the packed bytes by the layout that the header draws, not by
the package's own reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.compute.native import _native

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

BLOCK, STEP = 16, 32
_U4, _U8, _BF16, _U6 = 0, 1, 2, 5
_FLOAT32, _PARTS = 1, 2  # of scales


def bf16(values: Float32) -> Float32:
    """Rounded to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def fused(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which keeps the second
    rounding from going wrong (Boldo and Melquiond, "Emulation of a FMA and correctly rounded
    sums", IEEE Transactions on Computers 57(4), 2008).
    """
    product, c64 = a.astype(np.float64) * b, c.astype(np.float64)
    with np.errstate(invalid="ignore"):
        total = product + c64
        virtual = total - product
        error = (product - (total - virtual)) + (c64 - virtual)
    even = total.view(np.int64) % 2 == 0
    odd = np.isfinite(total) & (error != 0) & even
    total = np.where(odd, np.nextafter(total, np.copysign(np.inf, error)), total)
    with np.errstate(over="ignore"):
        return total.astype(np.float32)


def rounded_twice(a: Float32, b: Float32, c: Float32) -> Float32:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(a * b, np.float32) + c


FMA = {"portable": rounded_twice, "avx2": fused, "avx512": fused}
"""What each tier without tiles takes for a * b + c."""


@dataclass(frozen=True)
class Codes:
    """Integer weights: scale * (code - offset), or scale * code + min.

    Attributes:
        codes: [outputs, steps * 32], the offset taken off.
        scales: [outputs, groups].
        mins: [outputs, steps] or None.
    """

    codes: Int64
    scales: Float32
    mins: Float32 | None

    @property
    def groups(self) -> int:
        """Of a step."""
        return 1 if self.codes.shape[1] == self.scales.shape[1] * STEP else 2


def packed_codes(packed: _native.PackedLinear) -> Codes:
    layout = _native.packed_layout(packed)
    outputs, steps = packed.outputs, -(-packed.inputs // STEP)
    blocks = np.asarray(_native.packed_bytes(packed)).reshape(-1, layout["block_bytes"])
    lines = {_U4: 4, _U6: 6, _U8: 8}[layout["codes"]]
    raw = blocks[:, : steps * lines * 64].reshape(len(blocks), steps, lines, BLOCK, 4)
    if layout["codes"] != _U8:
        lower, upper = raw[:, :, :4], raw[:, :, 4:]
        raw = np.concatenate([lower & 15, lower >> 4], axis=2)
        if layout["codes"] == _U6:
            fields = [upper[:, :, line // 4] >> (line + 2) % 4 * 2 & 3 for line in range(8)]
            raw |= np.stack(fields, axis=2) << 4
    codes = raw.transpose(0, 3, 1, 2, 4).reshape(-1, steps * STEP)[:outputs].astype(np.int64)

    def table(at: int, groups: int) -> Float32:
        count = steps * groups
        if layout["scales"] == _PARTS:
            size = steps // 8 * (32 + 8 * groups * BLOCK)
            parts = np.ascontiguousarray(blocks[:, at : at + size])
            parts = parts.reshape(len(blocks), steps // 8, 2 + 8 * groups, BLOCK)
            halves = np.ascontiguousarray(parts[:, :, :2]).view(np.float16)
            halves = halves.reshape(len(blocks), -1, 1, BLOCK).astype(np.float32)
            values = halves * parts[:, :, 2:].view(np.int8).astype(np.float32)
        else:
            kind = np.float32 if layout["scales"] == _FLOAT32 else np.float16
            size = count * BLOCK * np.dtype(kind).itemsize
            values = np.ascontiguousarray(blocks[:, at : at + size]).view(kind)
        by_output = values.reshape(-1, count, BLOCK).swapaxes(1, 2).reshape(-1, count)
        return by_output[:outputs].astype(np.float32)

    scales = table(layout["scales_at"], STEP // layout["group"])
    mins = table(layout["mins_at"], 1) if layout["mins"] else None
    return Codes(codes - layout["offset"], scales, mins)


def packed_halves(packed: _native.PackedLinear) -> Float32:
    """Weights held in bf16: [outputs, steps * 32]."""
    steps = -(-packed.inputs // STEP)
    raw = np.asarray(_native.packed_bytes(packed)).view(np.uint16)
    raw = raw.reshape(-1, steps * STEP // 2, BLOCK, 2).swapaxes(1, 2)
    wide = raw.reshape(-1, steps * STEP)[: packed.outputs].astype(np.uint32) << 16
    return wide.view(np.float32)


def twelve_bits(x: Float32) -> tuple[Int64, Float32]:
    """(whole numbers [rows, inputs], scales [rows]) of activations."""
    largest = np.abs(x).max(axis=1)
    tiny = largest < np.float32(1e-30)
    inverse = np.float32(2032) / np.where(tiny, np.float32(1), largest)
    q = np.rint(x * inverse[:, None]).astype(np.int64)
    q[tiny] = 0
    return q, np.where(tiny, np.float32(0), largest / np.float32(2032))


def eight_bits(x: Float32) -> tuple[Int64, Float32]:
    """(whole numbers [rows, steps * 32], scales [rows, steps]) of activations."""
    x = padded(x, -(-x.shape[1] // STEP) * STEP)
    steps = x.reshape(len(x), -1, STEP)
    largest = np.abs(steps).max(axis=2)
    tiny = largest < np.float32(1e-30)
    inverse = np.float32(127) / np.where(tiny, np.float32(1), largest)
    q = np.rint(steps * inverse[:, :, None]).astype(np.int64)
    q[tiny] = 0
    return q.reshape(len(x), -1), np.where(tiny, np.float32(0), largest / np.float32(127))


def padded(x: npt.NDArray[np.generic], width: int) -> npt.NDArray[np.generic]:
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def stated_product(
    isa: str, packed: _native.PackedLinear, x: Float32, activations: str = "auto"
) -> Float32:
    """x @ weights.T as a tier without tiles computes it: [rows, outputs]."""
    fma = FMA[isa]
    if _native.packed_layout(packed)["codes"] == _BF16:
        return _product_of_halves(fma, packed_halves(packed), bf16(x))
    weights = packed_codes(packed)
    if activations == "int8":
        return _product_by_steps(fma, weights, *eight_bits(x))
    numbers, scales = twelve_bits(x)
    q = padded(numbers, weights.codes.shape[1])
    acc = np.zeros((len(x), packed.outputs), np.float32)
    size = STEP // weights.groups
    for step in range(q.shape[1] // STEP):
        for group in range(step * weights.groups, (step + 1) * weights.groups):
            inputs = slice(group * size, (group + 1) * size)
            sums = (q[:, inputs] @ weights.codes[:, inputs].T).astype(np.float32)
            acc = fma(weights.scales[None, :, group], sums, acc)
        if weights.mins is not None:
            total = q[:, step * STEP : (step + 1) * STEP].sum(axis=1).astype(np.float32)
            acc = fma(weights.mins[None, :, step], total[:, None], acc)
    with np.errstate(over="ignore"):
        return acc * scales[:, None]


def _product_by_steps(fma: object, weights: Codes, q: Int64, scales: Float32) -> Float32:
    acc = np.zeros((len(q), len(weights.codes)), np.float32)
    size = STEP // weights.groups
    for step in range(q.shape[1] // STEP):
        own = scales[:, step, None]
        for group in range(step * weights.groups, (step + 1) * weights.groups):
            inputs = slice(group * size, (group + 1) * size)
            sums = (q[:, inputs] @ weights.codes[:, inputs].T).astype(np.float32)
            acc = fma(weights.scales[None, :, group] * own, sums, acc)  # type: ignore[operator]
        if weights.mins is not None:
            total = q[:, step * STEP : (step + 1) * STEP].sum(axis=1).astype(np.float32)[:, None]
            acc = fma(weights.mins[None, :, step], total * own, acc)  # type: ignore[operator]
    return acc


def _product_of_halves(fma: object, weights: Float32, x: Float32) -> Float32:
    x = padded(x, weights.shape[1])
    sums = [np.zeros((len(x), len(weights)), np.float32) for _ in range(2)]
    for k in range(weights.shape[1]):
        sums[k % 2] = fma(x[:, k, None], weights[None, :, k], sums[k % 2])  # type: ignore[operator]
    return sums[0] + sums[1]
