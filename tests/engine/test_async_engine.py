"""The async facade: many tasks on one engine, leaving whenever they like."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.tiny import make_core, tiny_model

from trimaran.compute.native.backend import NativeBackend
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.errors import EngineClosedError, RequestError, RequestFailedError
from trimaran.core.request import FinishReason
from trimaran.core.retention import Retention
from trimaran.core.sampling_batch import Float32
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.core import EngineCore

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


async def idle(core: EngineCore) -> None:
    """Waits until nothing runs; the engine's own thread does the work."""
    for _ in range(500):
        if not core.has_work:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine still has work")


def test_many_tasks_get_what_each_would_get_alone() -> None:
    prompts = [[i, i + 1, 2 * i] for i in range(1, 20)]

    async def main() -> None:
        async with AsyncEngine(make_core()) as engine:
            alone = [(await engine.generate(p, PARAMS)).outputs[0].token_ids for p in prompts]
            outputs = await asyncio.gather(*(engine.generate(p, PARAMS) for p in prompts))
            assert [o.outputs[0].token_ids for o in outputs] == alone

    asyncio.run(main())


def test_leaving_a_stream_aborts_the_request() -> None:
    async def main() -> None:
        core = make_core()
        async with AsyncEngine(core) as engine:
            stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=None, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            task = asyncio.create_task(
                engine.generate([4, 5], SamplingParams(max_tokens=None, ignore_eos=True))
            )
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(core)
            assert core.scheduler.kv.usage().held == 0
            assert len((await engine.generate([7], PARAMS)).outputs[0].token_ids) == 20

    asyncio.run(main())


def test_abort_from_another_task_ends_the_stream_with_the_reason() -> None:
    async def main() -> None:
        async with AsyncEngine(make_core()) as engine:
            params = SamplingParams(max_tokens=None, ignore_eos=True, n=3)
            reasons = []
            async for delta in engine.stream([1, 2], params, request_id="mine"):
                engine.abort("mine")
                if delta.finish_reason is not None:
                    reasons.append(delta.finish_reason)
            assert reasons
            assert set(reasons) == {FinishReason.ABORT}

    asyncio.run(main())


def test_a_bad_prompt_raises_in_its_own_task_only() -> None:
    async def main() -> None:
        async with AsyncEngine(make_core()) as engine:
            results = await asyncio.gather(
                engine.generate([], PARAMS),
                engine.generate([1], PARAMS),
                engine.generate([9999], PARAMS),
                return_exceptions=True,
            )
            assert isinstance(results[0], RequestError)
            assert not isinstance(results[1], BaseException)
            assert isinstance(results[2], RequestError)

    asyncio.run(main())


def test_a_closed_engine_says_so_and_ends_what_runs() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_core())
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        task = asyncio.create_task(engine.generate([1, 2], endless))
        await asyncio.sleep(0.02)
        await engine.close()
        with pytest.raises(RequestFailedError, match="closed"):
            await task
        with pytest.raises(EngineClosedError):
            await engine.generate([1], PARAMS)
        await engine.close()

    asyncio.run(main())


def test_a_step_loop_that_dies_fails_everybody_with_the_reason() -> None:
    class Broken(ReferenceBackend):
        def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
            raise SystemError("a step that fails is the request's trouble")

    async def main() -> None:
        core = make_core(Broken(tiny_model()))
        async with AsyncEngine(core) as engine:
            with pytest.raises(RequestFailedError, match="the step failed"):
                await engine.generate([1, 2], PARAMS)

            def boom() -> None:
                raise ValueError("a bug in the scheduler")

            core.scheduler.schedule = boom  # type: ignore[method-assign,assignment]
            with pytest.raises(RequestFailedError, match="a bug in the scheduler"):
                await engine.generate([1, 2], PARAMS)
            with pytest.raises(EngineClosedError, match="a bug in the scheduler"):
                await engine.generate([1, 2], PARAMS)

    asyncio.run(main())


def test_a_loop_that_is_never_idle_leaves_the_engine_its_turn() -> None:
    """Hundreds of steps in native code; at Python's own interval a step can take seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)

    async def main() -> None:
        core = make_core(backend=NativeBackend(tiny_model(), threads=2))
        async with AsyncEngine(core) as engine:
            task = asyncio.create_task(engine.generate([1, 2, 3], params))
            end = time.monotonic() + 6
            while not task.done() and time.monotonic() < end:
                until = time.perf_counter() + 0.002
                while time.perf_counter() < until:
                    pass
                await asyncio.sleep(0)
            assert task.done()

    asyncio.run(main())


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_the_prefix_cache_can_be_looked_into_and_reset(index: str) -> None:
    prompt = list(range(40))

    async def main() -> None:
        async with AsyncEngine(make_core(index=index)) as engine:
            kept = Retention(80, seconds=60.0)
            for salt in ("", "secret", "secret"):
                await engine.generate(prompt, PARAMS, cache_salt=salt, retention=kept)
            report = await engine.inspect_prefix_cache()
            assert [own.hits for own in report.namespaces] == [0, 1]
            assert "secret" not in repr(report)
            assert report.hit_tokens == (39 if index == "radix" else 32)
            assert report.free + report.held + report.cached == report.total
            engine.reset_prefix_cache()
            report = await engine.inspect_prefix_cache(top=0)
            assert (report.cached, report.namespaces, report.hottest) == (0, [], [])
            assert (await engine.generate(prompt, PARAMS)).cached_tokens == 0
            with pytest.raises(RequestError, match="retention is 80"):
                await engine.generate(prompt, PARAMS, retention=80)  # type: ignore[arg-type]
        with pytest.raises(EngineClosedError):
            await engine.inspect_prefix_cache()

    asyncio.run(main())


def test_who_asks_and_goes_away_or_asks_badly_hurts_nobody() -> None:
    async def main() -> None:
        async with AsyncEngine(make_core()) as engine:
            for _ in range(20):
                task = asyncio.create_task(engine.inspect_prefix_cache())
                await asyncio.sleep(0)
                task.cancel()
            with pytest.raises(TypeError):
                await engine.inspect_prefix_cache("ten")  # type: ignore[arg-type]
            assert (await engine.generate([1, 2], PARAMS)).outputs[0].token_ids

    asyncio.run(main())
