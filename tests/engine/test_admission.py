"""The limit on waiting requests: refused with a hint, and nobody else is disturbed."""

from __future__ import annotations

import asyncio

import pytest
from support.tiny import make_core

from trimaran.core.config import EngineConfig
from trimaran.core.errors import BusyError, ConfigError
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.admission import Admission
from trimaran.engine.async_engine import AsyncEngine

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def test_who_finds_a_seat_never_waits() -> None:
    admission = Admission(0, seats=2)
    admission.check(waiting=0, running=1, now=0.0)
    admission.check(waiting=1, running=0, now=0.0)
    for waiting, running in ((0, 2), (1, 1), (2, 0), (5, 2)):
        with pytest.raises(BusyError):
            admission.check(waiting, running, now=0.0)
    Admission(None, seats=1).check(waiting=10**6, running=1, now=0.0)


def test_the_hint_is_how_long_the_excess_takes() -> None:
    admission = Admission(4, seats=2)
    with pytest.raises(BusyError, match="4 requests wait and max_waiting is 4") as unknown:
        admission.check(waiting=4, running=2, now=0.0)
    assert unknown.value.retry_after == 1.0
    for second in range(10):
        admission.ended(float(second))
    for waiting, expected in ((4, 1.0), (7, 4.0)):
        with pytest.raises(BusyError) as busy:
            admission.check(waiting, running=2, now=10.0)
        assert busy.value.retry_after == pytest.approx(expected)
    with pytest.raises(BusyError) as slow:  # nothing has ended for long
        admission.check(waiting=4, running=2, now=100.0)
    assert slow.value.retry_after == pytest.approx(10.0)


def test_refusals_leave_the_others_alone() -> None:
    async def main() -> None:
        core = make_core(max_num_seqs=2, max_waiting=3)
        async with AsyncEngine(core) as engine:
            alone = (await engine.generate([1, 2], PARAMS)).outputs[0].token_ids
            results = await asyncio.gather(
                *(engine.generate([1, 2], PARAMS) for _ in range(12)), return_exceptions=True
            )
            served = [r for r in results if not isinstance(r, BaseException)]
            refused = [r for r in results if isinstance(r, BusyError)]
            assert len(served) + len(refused) == 12
            assert len(served) >= 5 and refused
            assert all(r.outputs[0].token_ids == alone for r in served)
            assert all(r.retry_after > 0 for r in refused)
            assert core.metrics.rejections == {"max_waiting": len(refused)}
            assert (await engine.generate([1, 2], PARAMS)).outputs[0].token_ids == alone
            assert core.scheduler.kv.usage().held == 0

    asyncio.run(main())


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_bad_limits_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_waiting"):
        EngineConfig.from_mapping({"max_waiting": value})


@pytest.mark.parametrize("value", [0, -1.0, "soon", True])
def test_bad_timeouts_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="step_timeout"):
        EngineConfig.from_mapping({"step_timeout": value})
