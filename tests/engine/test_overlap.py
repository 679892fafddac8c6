"""Text and delivery beside the next step: nothing changes but when they happen."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import make_core, tiny_model

from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.clock import SystemClock
from trimaran.core.outputs import RequestOutput, SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.core.sampling_batch import Float32
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.engine.collector import OutputCollector
from trimaran.engine.core import EngineCore
from trimaran.engine.side_thread import SideThread
from trimaran.engine.thread import EngineThread


def through_thread(core: EngineCore, requests: list[Request], overlap: bool) -> list[RequestOutput]:
    thread = EngineThread(core, overlap=overlap)
    inbox: queue.SimpleQueue[list[SequenceDelta]] = queue.SimpleQueue()
    collectors = {r.id: OutputCollector(r.id, None, r.prompt, r.params.n) for r in requests}
    try:
        for request in requests:
            thread.submit(request, inbox.put)
        left = set(collectors)
        while left:
            for delta in inbox.get(timeout=60):
                assert delta.request_id in left, "a delta after the last one"
                if collectors[delta.request_id].add(delta):
                    left.discard(delta.request_id)
    finally:
        thread.close()
    return [collectors[r.id].result() for r in requests]


def what_counts(output: RequestOutput) -> list[Any]:
    return [
        (o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in output.outputs
    ] + [output.prompt_logprobs]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_outputs_are_those_of_doing_one_thing_after_the_other(data: st.DataObject) -> None:
    options = {
        "blocks": data.draw(st.integers(20, 60)),
        "block_size": 4,
        "max_model_len": 60,
        "max_num_batched_tokens": data.draw(st.integers(4, 64)),
    }
    texts = st.sampled_from(["a", "e", "\x00", "\ufffd\ufffd", "t", "zz", "é", "no such text"])
    requests = []
    for i in range(data.draw(st.integers(1, 5))):
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            seed=i,
            n=data.draw(st.integers(1, 3)),
            max_tokens=data.draw(st.integers(1, 12)),
            stop=data.draw(st.lists(texts, max_size=3)),
            min_tokens=data.draw(st.integers(0, 1)),
            logprobs=data.draw(st.sampled_from([None, 0, 2])),
            prompt_logprobs=data.draw(st.sampled_from([None, 1])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        )
        prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))
        requests.append(Request(f"r{i}", prompt, params))
    found = {}
    for overlap in (False, True):
        core = make_core(**options)  # type: ignore[arg-type]
        outputs = through_thread(core, requests, overlap)
        found[overlap] = [what_counts(output) for output in outputs]
        # What a stop string ended was not sampled any further, though it was in the next step.
        delivered = sum(len(o.token_ids) for output in outputs for o in output.outputs)
        assert core.metrics.generated_tokens == delivered
        core.scheduler.kv.check()
        assert core.scheduler.kv.usage().held == 0
        assert all(output.metrics and output.metrics.finished is not None for output in outputs)
    assert found[True] == found[False]


class Slow(ReferenceBackend):
    """Takes its time, without the GIL, as native code does."""

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        time.sleep(0.02)
        return super().run(plan, pooled)


class Patient(ReferenceBackend):
    """Returns from a step only once the deltas of the step before have come."""

    def __init__(self) -> None:
        super().__init__(tiny_model())
        self.came = threading.Semaphore(1)  # nothing is to come before the first step

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        if not self.came.acquire(timeout=60):
            raise RuntimeError("nothing came while this step was computed")
        return super().run(plan, pooled)


def test_deltas_come_while_the_next_step_computes() -> None:
    backend = Patient()
    thread = EngineThread(make_core(backend))
    last: queue.SimpleQueue[SequenceDelta] = queue.SimpleQueue()

    def sink(deltas: list[SequenceDelta]) -> None:
        backend.came.release()
        if deltas[-1].finish_reason is not None:
            last.put(deltas[-1])

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    thread.submit(Request("one", [1, 2], params), sink)
    end = last.get(timeout=120)
    thread.close()
    assert (end.finish_reason, end.error) == (FinishReason.LENGTH, None)


def test_a_stop_string_frees_within_one_step_and_abort_at_once() -> None:
    core = make_core()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    text = through_thread(make_core(), [Request("x", [72, 101], params)], True)[0].text
    stop = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=text[2:4])
    aside = SideThread("test")
    live = core.add(Request("stops", [72, 101], stop))
    core.add(Request("goes on", [5, 6, 7], params))
    events: list[Any] = []
    stopped_at = None
    for step in range(40):
        before = list(events)

        def deliver(before: list[Any] = before, step: int = step) -> None:
            nonlocal stopped_at
            for own in core.assemble(before).values():
                if any(d.finish_reason is FinishReason.STOP for d in own):
                    stopped_at = step

        events = core.compute(aside, deliver)
        if stopped_at is not None:
            break
    sequence = live.generations[0].sequence
    assert stopped_at == step and sequence.finished  # taken out with the step that saw it
    assert core.scheduler.kv.block_table(sequence) == []
    core.abort("goes on")
    assert core.scheduler.kv.usage().held == 0
    aside.close()


def test_an_error_beside_the_step_reaches_its_owner() -> None:
    aside = SideThread("test")

    def fails() -> None:
        raise ValueError("a bug")

    aside.start(fails)
    with pytest.raises(ValueError, match="a bug"):
        aside.join()
    aside.start(lambda: None)
    aside.join()
    aside.close()


def test_the_gap_between_forwards_is_measured() -> None:
    core = make_core(Slow(tiny_model()))
    core.clock = SystemClock()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    through_thread(core, [Request("one", [1, 2, 3], params)], True)
    metrics = core.metrics
    assert metrics.steps == 8
    assert metrics.compute_gap_seconds.count == metrics.step_interval_seconds.count == 7
    assert metrics.schedule_seconds.count == 8
    assert 0 < metrics.compute_gap_seconds.sum < metrics.step_interval_seconds.sum
    assert metrics.step_interval_seconds.sum >= 7 * 0.02
    assert metrics.compute_gap_seconds.quantile(0.5) <= metrics.compute_gap_seconds.quantile(1.0)
