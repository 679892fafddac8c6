"""Back ends that hang, fail or give garbage, and a scheduler that gets nowhere."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.tiny import make_core, tiny_model

from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.errors import EngineUnhealthyError, RequestFailedError
from trimaran.core.sampling_batch import Float32
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.engine.async_engine import AsyncEngine

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
POISON = 200


class Moody(ReferenceBackend):
    """Does something else once a prompt has the token POISON."""

    def __init__(self, mood: Callable[[Float32, StepPlan], Float32]) -> None:
        super().__init__(tiny_model())
        self._mood = mood

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        logits = super().run(plan, pooled)
        return self._mood(logits, plan) if POISON in plan.tokens else logits


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_a_step_that_hangs_fails_its_requests_and_the_engine_recovers() -> None:
    release = threading.Event()

    def hang(logits: Float32, plan: StepPlan) -> Float32:
        release.wait(60)
        return logits

    async def main() -> None:
        core = make_core(Moody(hang), step_timeout=0.4, max_num_seqs=1)
        async with AsyncEngine(core) as engine:
            expected = (await engine.generate([1, 2], PARAMS)).outputs[0].token_ids
            bad = asyncio.create_task(engine.generate([POISON], PARAMS, request_id="bad"))
            await until(lambda: core.scheduler.num_running == 1)
            waiting = asyncio.create_task(engine.generate([1, 2], PARAMS))
            with pytest.raises(RequestFailedError, match="'bad'.*1 rows, 1 sequences hasn't ended"):
                await bad
            assert not engine.health().ok and "hasn't ended" in engine.health().reason
            with pytest.raises(EngineUnhealthyError, match="try again"):
                await engine.generate([3], PARAMS)
            assert not waiting.done()  # it wasn't in the step
            release.set()
            assert (await waiting).outputs[0].token_ids == expected
            assert engine.health().ok
            assert core.metrics.failures == {"hang": 1}
            await until(lambda: not core.has_work)
            core.scheduler.kv.check()
            assert core.scheduler.kv.usage().held == 0

    asyncio.run(main())


def test_closing_does_not_wait_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("trimaran.engine.thread._HANGING_SECONDS", 0.2)

    def hang(logits: Float32, plan: StepPlan) -> Float32:
        release.wait(60)
        return logits

    async def main() -> None:
        engine = AsyncEngine(make_core(Moody(hang), step_timeout=0.2, max_num_seqs=1))
        bad = asyncio.create_task(engine.generate([POISON], PARAMS))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(engine.generate([1, 2], PARAMS))
        with pytest.raises(RequestFailedError):
            await bad
        await engine.close()
        with pytest.raises(RequestFailedError, match="closed while"):
            await waiting

    asyncio.run(main())
    release.set()


def fails(logits: Float32, plan: StepPlan) -> Float32:
    raise RuntimeError("the device is gone")


def no_numbers(logits: Float32, plan: StepPlan) -> Float32:
    return np.full_like(logits, np.nan)


def too_few_rows(logits: Float32, plan: StepPlan) -> Float32:
    return logits[:0]


@pytest.mark.parametrize(
    ("mood", "message"),
    [(fails, "device is gone"), (no_numbers, "NaN"), (too_few_rows, "logits of shape")],
)
def test_a_back_end_that_misbehaves_hurts_those_in_the_step(
    mood: Callable[[Float32, StepPlan], Float32], message: str
) -> None:
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logprobs=1)

    async def main() -> None:
        core = make_core(Moody(mood), step_timeout=5.0)
        async with AsyncEngine(core) as engine:
            expected = (await engine.generate([1, 2], PARAMS)).outputs[0].token_ids
            for params in (PARAMS, scored):
                with pytest.raises(RequestFailedError, match=message):
                    await engine.generate([5, POISON, 6], params)
            assert (await engine.generate([1, 2], PARAMS)).outputs[0].token_ids == expected
            assert engine.health().ok
            assert core.scheduler.kv.usage().held == 0

    asyncio.run(main())


def test_a_scheduler_that_gets_nowhere_fails_what_it_does_not_serve() -> None:
    async def main() -> None:
        core = make_core(step_timeout=0.3)
        schedule = core.scheduler.schedule
        async with AsyncEngine(core) as engine:
            core.scheduler.schedule = lambda: None  # type: ignore[method-assign]
            idle = engine.open(PARAMS)  # waits for its prompt, and for nobody else
            with pytest.raises(RequestFailedError, match="no request further.*0 sequences run, 1"):
                await engine.generate([1, 2], PARAMS)
            core.scheduler.schedule = schedule  # type: ignore[method-assign]
            idle.append("still there")
            idle.finish()
            assert len([d async for d in idle]) >= 4
            assert core.metrics.failures == {"stall": 1}
            assert engine.health().ok

    asyncio.run(main())


def test_long_work_is_no_hang_and_no_stall() -> None:
    def slow(logits: Float32, plan: StepPlan) -> Float32:
        time.sleep(0.05)
        return logits

    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={POISON: 1e4})

    async def main() -> None:
        core = make_core(Moody(slow), step_timeout=0.5, max_num_batched_tokens=4)
        async with AsyncEngine(core) as engine:
            output = await engine.generate([POISON] * 60, params)
            assert output.outputs[0].token_ids == [POISON] * 20
            assert core.metrics.failures == {}

    asyncio.run(main())
