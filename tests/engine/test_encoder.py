"""The encoder's step loop: company changes no bit, seats and budget hold, nothing leaks."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.compute.reference.encoder import ReferenceEncoder
from trimaran.core.clock import SystemClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import (
    BackendError,
    BusyError,
    CheckpointError,
    ConfigError,
    EngineClosedError,
    RequestError,
    RequestFailedError,
)
from trimaran.core.request import Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import StepPlan
from trimaran.engine.encoder_core import EncoderCore, Vector, load_encoder_core
from trimaran.engine.encoder_engine import EncoderEngine
from trimaran.models.bert import BertModel, EncoderConfig, bert_tensors
from trimaran.models.weight import Weight

CONFIG = EncoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_positions=24,
    num_types=2,
    context_length=20,
    layer_norm_eps=1e-12,
    pooling="mean",
    normalize=True,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Array:
    """A tensor in memory."""

    values: np.ndarray
    type_name: str = "F32"

    def raw(self) -> np.ndarray:
        return self.values.view(np.uint8)

    def dequantize(self) -> np.ndarray:
        return self.values


def weights(config: EncoderConfig = CONFIG) -> dict[str, Weight]:
    random = np.random.default_rng(7)
    return {
        name: Weight(name, shape, _Array(random.normal(0, 0.5, shape).astype(np.float32)))
        for name, shape in bert_tensors(config).items()
    }


MODEL = BertModel(CONFIG, weights())


def make_core(backend: object = None, **options: object) -> EncoderCore:
    config = EngineConfig(block_size=4, **options)  # type: ignore[arg-type]
    return EncoderCore(CONFIG, None, backend or ReferenceEncoder(MODEL), config, SystemClock())  # type: ignore[arg-type]


def vector(ids: list[int]) -> Vector:
    core = make_core()
    core.add(Request("alone", ids, SamplingParams()))
    (found,) = core.step()
    assert found.vector is not None
    return found.vector


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_company_changes_no_bit_and_nothing_leaks(data: st.DataObject) -> None:
    core = make_core(
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(8, 40)),
        order=data.draw(st.sampled_from(["fcfs", "priority"])),
    )
    texts: dict[str, list[int]] = {}
    waiting, ended, aborted = set(), {}, set()
    for i in range(data.draw(st.integers(1, 12))):
        name = f"t{i}"
        texts[name] = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=20))
        core.add(Request(name, texts[name], SamplingParams(), priority=i % 3))
        waiting.add(name)
        if data.draw(st.booleans()):
            if data.draw(st.booleans()):
                aborted.add(name)
                waiting.discard(name)
                core.abort(name)
            ended |= {each.request.id: each.vector for each in core.step()}
        core.scheduler.kv.check()
    steps = 0
    while core.has_work:
        found = core.step()
        assert 0 < len(found) <= core.config.max_num_seqs
        ended |= {each.request.id: each.vector for each in found}
        core.scheduler.kv.check()
        steps += 1
        assert steps < 100
    assert ended.keys() == waiting
    for name, got in ended.items():
        np.testing.assert_array_equal(got, vector(texts[name]))
        assert abs(float(np.linalg.norm(got)) - 1) < 1e-6
    assert core.scheduler.kv.usage().held == 0
    assert not core.scheduler.has_work()


def test_every_token_sees_every_other() -> None:
    """A causal model's first vector would not know of the last token."""
    first = dataclasses.replace(CONFIG, pooling="cls")
    core = EncoderCore(
        first, None, ReferenceEncoder(BertModel(first, weights())), EngineConfig(), SystemClock()
    )  # type: ignore[arg-type]
    found = []
    for name, ids in (("a", [1, 2, 3]), ("b", [1, 2, 4])):
        core.add(Request(name, ids, SamplingParams()))
        found.append(core.step()[0].vector)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_what_cant_be_encoded_is_refused() -> None:
    core = make_core()
    for ids, why in (([], "no tokens"), ([1] * 21, "21 tokens"), ([50], "id 50"), ([-1], "id -1")):
        with pytest.raises(RequestError, match=why):
            core.check(Request("r", ids, SamplingParams()))
    with pytest.raises(ConfigError, match="max_model_len is 21"):
        make_core(max_model_len=21)


def test_a_step_that_fails_fails_alone() -> None:
    class Broken(ReferenceEncoder):
        broken = True

        def run(self, plan: StepPlan) -> Vector:
            if self.broken:
                raise BackendError("no more memory")
            return super().run(plan)

    backend = Broken(MODEL)
    core = make_core(backend)
    core.add(Request("a", [1, 2], SamplingParams()))
    (found,) = core.step()
    assert found.vector is None
    assert found.error == "BackendError: no more memory"
    backend.broken = False
    core.add(Request("b", [1, 2], SamplingParams()))
    (found,) = core.step()
    np.testing.assert_array_equal(found.vector, vector([1, 2]))
    assert core.scheduler.kv.usage().held == 0


def test_many_tasks_cancel_and_close() -> None:
    async def test() -> None:
        engine = EncoderEngine(make_core(max_num_seqs=4))
        texts = [[i % 50, 3, 4] for i in range(60)]
        streams = [engine.start(ids) for ids in texts]
        for stream in streams[::3]:
            stream.close()
        for i, (ids, stream) in enumerate(zip(texts, streams, strict=True)):
            if i % 3:
                np.testing.assert_array_equal(await stream.vector(), vector(ids))
        assert await engine.ask(lambda core: core.scheduler.kv.usage().held) == 0
        assert engine.health().ok
        await engine.close()
        assert not engine.health().ok
        with pytest.raises(EngineClosedError):
            engine.start([1])

    asyncio.run(test())


class Held(ReferenceEncoder):
    """Its first step ends when it is told to."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.texts = 0

    def run(self, plan: StepPlan) -> Vector:
        self.texts += plan.sequences
        self.begun.set()
        assert self.go_on.wait(30)
        return super().run(plan)


def test_what_nobody_waits_for_is_not_computed() -> None:
    async def test() -> None:
        backend = Held()
        engine = EncoderEngine(make_core(backend, max_num_seqs=1))
        first, second = engine.start([1]), engine.start([2])
        await asyncio.to_thread(backend.begun.wait, 30)
        waiting = asyncio.create_task(second.vector())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        second.close()
        backend.go_on.set()
        await first.vector()
        assert await engine.ask(lambda core: core.has_work) is False
        assert backend.texts == 1
        await engine.close()

    asyncio.run(test())


def test_no_more_wait_than_may() -> None:
    async def test() -> None:
        backend = Held()
        engine = EncoderEngine(make_core(backend, max_num_seqs=1, max_waiting=2))
        streams = [engine.start([1])]
        await asyncio.to_thread(backend.begun.wait, 30)
        streams += [engine.start([2]), engine.start([3])]
        for count in (1, 2):
            with pytest.raises(BusyError, match="max_waiting is 2") as refused:
                engine.start([4])
            assert refused.value.retry_after is not None
            assert refused.value.retry_after > 0
            assert engine.core.metrics.rejections == {"max_waiting": count}
        backend.go_on.set()
        for stream, ids in zip(streams, ([1], [2], [3]), strict=True):
            np.testing.assert_array_equal(await stream.vector(), vector(ids))
        await engine.start([4]).vector()
        await engine.close()

    asyncio.run(test())


def test_a_bug_in_the_loop_is_told_to_everybody() -> None:
    async def test() -> None:
        core = make_core()
        engine = EncoderEngine(core)
        core.step = lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises((RequestFailedError, EngineClosedError), match="ZeroDivisionError"):
            await engine.start([1]).vector()
        await engine.close()

    asyncio.run(test())


def test_tensors_are_checked() -> None:
    found = weights()
    del found["encoder.layer.1.output.dense.bias"]
    with pytest.raises(CheckpointError, match="layer.1.output.dense.bias"):
        BertModel(CONFIG, found)


def test_the_native_back_end_is_refused(minilm_path: Path) -> None:
    with pytest.raises(BackendError, match="reference"):
        load_encoder_core(minilm_path, EngineConfig(backend="native"), lambda name: None)
