"""Measured rates: the loops themselves, and the limits that follow from them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.compute.native import _native
from trimaran.compute.native.backend import available_isas
from trimaran.compute.native.calibration import (
    Calibration,
    Peak,
    Rate,
    Reading,
    calibrate,
    limits,
)

MIB = 1 << 20
RATES = st.floats(0.1, 1e4)


def flat(rate: float) -> Rate:
    return Rate(rate, rate, rate)


def made(reads: dict[int, float], peaks: dict[str, float], threads: int = 2) -> Calibration:
    """Rates by size and by "isa type", with all threads; with one they are a tenth."""
    counts = ((threads, 1.0), (1, 0.1))
    return Calibration(
        threads,
        tuple(Reading(b, n, flat(share * r)) for b, r in reads.items() for n, share in counts),
        tuple(
            Peak(*k.split(), n, flat(share * r)) for k, r in peaks.items() for n, share in counts
        ),
    )


@given(st.dictionaries(st.integers(1, 1 << 40), RATES, min_size=1), st.integers(1, 1 << 41))
def test_bandwidth_lies_between_those_of_the_sizes_around(
    reads: dict[int, float], size: int
) -> None:
    calibration = made(reads, {})
    below = [b for b in reads if b <= size] or [min(reads)]
    above = [b for b in reads if b >= size] or [max(reads)]
    around = (reads[max(below)], reads[min(above)])
    tolerance = 1e-9 * max(around)
    assert min(around) - tolerance <= calibration.bandwidth(size) <= max(around) + tolerance
    for known, rate in reads.items():
        assert calibration.bandwidth(known) == rate


@given(st.dictionaries(st.integers(1, 1 << 40), RATES), st.dictionaries(st.just("amx int8"), RATES))
def test_json_keeps_everything(reads: dict[int, float], peaks: dict[str, float]) -> None:
    calibration = made(reads, peaks)
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration


def test_limits_of_a_model() -> None:
    calibration = made(
        {MIB: 100.0, 1000 * MIB: 10.0}, {"amx int8": 8000.0, "avx2 int8": 400.0, "amx bf16": 4000.0}
    )
    sizes = {"weight_bytes": 1000 * MIB, "kv_bytes_per_token": MIB, "context": 1000}
    found = limits(calibration, linear_parameters=10**9, bf16=False, **sizes)
    assert found.bandwidth == 10.0
    assert found.decode_tokens_per_second == pytest.approx(10e9 / (1000 * MIB))
    assert found.decode_at_context == pytest.approx(10e9 / (2000 * MIB))
    assert found.prefill_tokens_per_second == pytest.approx(8000e9 / 2e9)
    wide = limits(calibration, linear_parameters=10**9, bf16=True, **sizes)
    assert wide.prefill_tokens_per_second == pytest.approx(4000e9 / 2e9)


def test_a_type_that_no_instruction_set_has_falls_back_to_float() -> None:
    calibration = made({MIB: 10.0}, {"portable f32": 20.0})
    assert calibration.peak("int8") == 0
    found = limits(
        calibration,
        weight_bytes=MIB,
        kv_bytes_per_token=1,
        linear_parameters=10**9,
        bf16=False,
        context=1,
    )
    assert found.prefill_tokens_per_second == pytest.approx(10.0)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("threads", [1, 3])
def test_every_loop_runs(isa: str, threads: int) -> None:
    names = _native.probe_names(isa)
    assert "f32" in names or "int8" in names
    for name in names:
        rates = _native.probe_operations(isa, name, threads, 2, 1e-4)
        assert len(rates) == 2
        # Below a hundred thousand operations a cycle; how far below, a busy machine decides.
        assert all(0 < rate < 1e15 for rate in rates)
    for size in (1, 511, 513, 3 * MIB + 7):
        assert all(rate > 0 for rate in _native.probe_reads(isa, size, threads, 2, 1e-4))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="portable has no loop in bf16"):
        _native.probe_operations("portable", "bf16", 1, 1, 1e-4)
    with pytest.raises(ValueError, match="isa is 'sse9'"):
        _native.probe_reads("sse9", MIB, 1, 1, 1e-4)
    with pytest.raises(ValueError, match="threads is 0"):
        _native.probe_operations("portable", "f32", 0, 1, 1e-4)
    with pytest.raises(ValueError, match="samples 0"):
        _native.probe_reads("portable", MIB, 1, 0, 1e-4)
    with pytest.raises(ValueError, match="bytes is 0"):
        _native.probe_reads("portable", 0, 1, 1, 1e-4)
    with pytest.raises(MemoryError):
        _native.probe_reads("portable", 1 << 60, 1, 1, 1e-4)


def test_calibrate_leaves_out_what_the_memory_has_no_room_for() -> None:
    calibration = calibrate(2, [5 * MIB], available=40 * MIB)
    assert {(r.bytes, r.threads) for r in calibration.reads} == {
        (size, threads) for size in (MIB, 5 * MIB, 8 * MIB) for threads in (1, 2)
    }
    assert {(p.isa, p.type) for p in calibration.peaks} == {
        (isa, name) for isa in available_isas() for name in _native.probe_names(isa)
    }
    for rated in (*calibration.reads, *calibration.peaks):
        assert 0 < rated.rate.lowest <= rated.rate.median <= rated.rate.highest
