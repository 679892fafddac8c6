"""Vectors of prompts: what they are of, and that they are the same bits in any company."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import make_core, tiny_model, tiny_tokenizer

from trimaran import LLM, AsyncEngine
from trimaran.compute.native.backend import NativeBackend, available_isas
from trimaran.compute.native.built import build
from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.compute.reference.ops import ReferenceOps
from trimaran.core.clock import VirtualClock
from trimaran.core.config import KV_FORMATS, WEIGHTS, EngineConfig
from trimaran.core.errors import BackendError, RequestError, RequestFailedError
from trimaran.core.outputs import SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import Float32, PooledRows, StepPlan
from trimaran.engine.core import EngineCore
from trimaran.engine.factory import LoadedModel, load_engine
from trimaran.engine.factory import make_core as make_windowed
from trimaran.engine.pooling import NO_TOKENS, normalized
from trimaran.models.model import Model

Vectors = dict[str, npt.NDArray[np.float32]]
draw = np.random.default_rng(3).integers
TOKENS = draw(0, 250, 70).tolist()
PREFIX = draw(0, 250, 40).tolist()
PROMPTS = {
    "a": PREFIX + draw(0, 250, 30).tolist(),
    "b": PREFIX + draw(0, 250, 3).tolist(),
    "c": draw(0, 250, 17).tolist(),
    "one": [7],
}


def pooled(name: str, prompt: list[int], pooling: str = "mean") -> Request:
    return Request(name, prompt, NO_TOKENS, pooling=pooling)


def text(name: str, prompt: list[int], tokens: int = 12) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    return Request(name, prompt, params)


def run(core: EngineCore, requests: list[Request]) -> dict[str, list[SequenceDelta]]:
    """All deltas by request; the pool's books are checked after each step."""
    found: dict[str, list[SequenceDelta]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for delta in core.step():
            found[delta.request_id].append(delta)
        core.scheduler.kv.check()
    assert core.scheduler.kv.usage().held == 0
    assert len(core._pools) == 0
    return found


def vectors(found: dict[str, list[SequenceDelta]]) -> Vectors:
    out = {}
    for name, deltas in found.items():
        if name in PROMPTS:
            (delta,) = deltas
            assert (delta.finish_reason, delta.token_ids, delta.text) == (FinishReason.STOP, [], "")
            assert delta.vector is not None
            out[name] = delta.vector
    return out


def alone(backend: Any, model: Model, pooling: str = "mean", **options: Any) -> Vectors:
    found: Vectors = {}
    for name, prompt in PROMPTS.items():
        core = make_core(backend(), model=model, **options)
        found |= vectors(run(core, [pooled(name, prompt, pooling)]))
        core.close()
    return found


def same(got: Vectors, wanted: Vectors) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name].tobytes() == wanted[name].tobytes(), name


class Whole(ReferenceBackend):
    """Keeps the hidden rows of a step, as the model itself hands them to `Ops.logits`."""

    rows: npt.NDArray[np.float32]

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        backend = self

        class Kept(ReferenceOps):
            def logits(self, x: Any, weight: Any) -> Any:
                backend.rows = x.copy()
                return super().logits(x, weight)

        from trimaran.compute.reference import backend as module

        original, module.ReferenceOps = module.ReferenceOps, Kept  # type: ignore[misc]
        try:
            return super().run(plan, pooled)
        finally:
            module.ReferenceOps = original  # type: ignore[misc]


def test_what_the_vectors_are() -> None:
    backend = Whole(tiny_model())
    prompt = PROMPTS["a"]
    for pooling, expected in (
        ("mean", lambda rows: rows.astype(np.float64).sum(axis=0) / len(prompt)),
        ("last", lambda rows: rows[-1]),
    ):
        found = run(make_core(backend), [pooled("a", prompt, pooling)])["a"][0].vector
        assert found is not None
        assert found.dtype == np.float32
        assert backend.rows.shape == (len(prompt), 32)
        np.testing.assert_allclose(found, expected(backend.rows), rtol=1e-6, atol=1e-7)
        assert np.linalg.norm(normalized(found)) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(normalized(np.zeros(4, np.float32)), np.zeros(4))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_same_bits_on_the_reference_back_end(pooling: str) -> None:
    """In any company, chunked anyhow, behind prefixes that are cached."""
    model = tiny_model()
    wanted = alone(lambda: ReferenceBackend(model), model, pooling)
    for budget, cached in product([2048, 37, 5, 1], [True, False]):
        core = make_core(
            ReferenceBackend(model), model=model, max_num_batched_tokens=budget, prefix_cache=cached
        )
        run(core, [text("before", PROMPTS["a"])])
        company = [text("t", PREFIX), text("u", PROMPTS["c"]), text("v", [1])]
        requests = company[:2] + [pooled(n, p, pooling) for n, p in PROMPTS.items()] + company[2:]
        same(vectors(run(core, requests)), wanted)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_same_bits_on_the_native_back_end(isa: str, kv: str, weights: str) -> None:
    model = tiny_model(5, hidden_size=40, intermediate_size=52)
    built = build(model, weights, isa)

    def backend(threads: int = 1) -> NativeBackend:
        return NativeBackend(built, kv=kv, threads=threads)

    wanted = alone(backend, model, block_size=16)
    for threads, budget in ((1, 7), (2, 2048), (3, 37), (4, 1)):
        core = make_core(
            backend(threads), model=model, block_size=16, max_num_batched_tokens=budget
        )
        run(core, [text("before", PROMPTS["a"])])
        company = [text("t", PREFIX), text("u", PROMPTS["c"])]
        requests = [company[0], *(pooled(n, p) for n, p in PROMPTS.items()), company[1]]
        same(vectors(run(core, requests)), wanted)
        core.close()


def test_native_and_reference_vectors_agree() -> None:
    model = tiny_model(2)
    native = NativeBackend(model, weights="bf16", threads=2)
    near = vectors(run(make_core(native, model=model), [pooled("a", PROMPTS["a"])]))["a"]
    exact = ReferenceBackend(model)
    wanted = vectors(run(make_core(exact, model=model), [pooled("a", PROMPTS["a"])]))["a"]
    assert float(normalized(near) @ normalized(wanted)) > 0.9995
    native.close()


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_the_same_bits_where_layers_see_windows(kind: str) -> None:
    model = tiny_model(windows=(20, 0))

    def engine(rows: int) -> EngineCore:
        config = EngineConfig.from_mapping(
            {"block_size": 4, "max_num_batched_tokens": rows, "kv_cache_bytes": 1 << 20}
        )
        backend: Any = (
            ReferenceBackend(model) if kind == "reference" else NativeBackend(model, threads=2)
        )
        loaded = LoadedModel(model.config, tiny_tokenizer(), None, backend)
        return make_windowed(loaded, config, VirtualClock())

    wanted: Vectors = {}
    for name, prompt in PROMPTS.items():
        wanted |= vectors(run(engine(64), [pooled(name, prompt)]))
    for rows in (1, 7, 33, 64):
        core = engine(rows)
        run(core, [text("before", PROMPTS["a"])])
        requests = [text("t", PREFIX), *(pooled(n, p) for n, p in PROMPTS.items())]
        same(vectors(run(core, requests)), wanted)
        core.close()


def test_prompts_that_are_pooled_change_no_tokens_and_leave_their_prefixes() -> None:
    """Others' text is the same beside them, and finds what they have computed."""
    requests = [text("t", [*PREFIX, 1, 2]), text("u", PROMPTS["c"])]
    own = run(make_core(), requests)
    core = make_core()
    found = run(core, [*requests, *(pooled(n, p) for n, p in PROMPTS.items())])
    for name in ("t", "u"):
        assert [(d.token_ids, d.logprobs) for d in found[name]] == [
            (d.token_ids, d.logprobs) for d in own[name]
        ]
    after = run(core, [text("w", PROMPTS["a"] + [9])])["w"][-1]
    assert after.metrics is not None
    assert after.metrics.cached_tokens >= 64
    again = run(core, [pooled("a", PROMPTS["a"])])["a"][0]
    assert again.metrics is not None
    assert again.metrics.cached_tokens == 0  # no token may be left out


def test_a_prompt_that_loses_its_blocks_midway_begins_again() -> None:
    prompt = TOKENS[:60]
    (wanted,) = run(make_core(), [pooled("a", prompt)])["a"]
    core = make_core(blocks=14, max_num_batched_tokens=3)
    found = run(core, [text("t", PREFIX[:20], 50), text("u", TOKENS[60:], 30), pooled("a", prompt)])
    (got,) = found["a"]
    assert got.metrics is not None
    assert got.metrics.preemptions > 0
    assert got.vector is not None
    assert wanted.vector is not None
    assert got.vector.tobytes() == wanted.vector.tobytes()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_same_bits_when_blocks_run_out_and_callers_leave(data: st.DataObject) -> None:
    """Few blocks, so that prompts lose theirs midway and begin again."""
    budget = data.draw(st.sampled_from([4, 9, 33]))
    options = {"blocks": 12, "max_num_batched_tokens": budget, "max_num_seqs": 4}
    core = make_core(**options)
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    prompts = {f"p{i}": TOKENS[i : i + length] for i, length in enumerate(lengths)}
    how = {name: data.draw(st.sampled_from(["mean", "last", "text"])) for name in prompts}
    found: dict[str, SequenceDelta] = {}
    left = list(prompts)
    while left or core.has_work:
        if left and not data.draw(st.booleans()):
            name = left.pop()
            kind = how[name]
            prompt = prompts[name]
            core.add(text(name, prompt) if kind == "text" else pooled(name, prompt, kind))
        deltas = core.step()
        if data.draw(st.integers(0, 9)) == 9:
            victim = data.draw(st.sampled_from(list(prompts)))
            deltas += [d for own in core.assemble(core.abort(victim)).values() for d in own]
        found |= {delta.request_id: delta for delta in deltas}
        core.scheduler.kv.check()
    assert core.scheduler.kv.usage().held == len(core._pools) == 0
    for name, delta in found.items():
        assert delta.finish_reason is not None
        if how[name] == "text" or delta.finish_reason is FinishReason.ABORT:
            assert delta.vector is None
            continue
        (one,) = run(make_core(), [pooled(name, prompts[name], how[name])])[name]
        assert delta.metrics is not None
        assert delta.vector is not None
        assert one.vector is not None
        assert delta.vector.tobytes() == one.vector.tobytes()


def test_a_vector_of_no_numbers_ends_only_its_request() -> None:
    class Poisoned(ReferenceBackend):
        def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
            logits = super().run(plan, pooled)
            if pooled is not None:
                for (first, end), sums in zip(pooled.rows, pooled.sums, strict=True):
                    if 200 in plan.tokens[first:end]:
                        sums[3] = np.nan
            return logits

    found = run(
        make_core(Poisoned(tiny_model())),
        [pooled("a", [1, 2, 3]), pooled("bad", [1, 200]), text("t", [5, 6])],
    )
    assert found["a"][0].vector is not None
    assert found["bad"][0].finish_reason is FinishReason.ERROR
    assert "finite" in (found["bad"][0].error or "")
    assert found["t"][-1].finish_reason is FinishReason.LENGTH


def test_a_whole_context_can_be_pooled_and_nothing_beyond() -> None:
    core = make_core(blocks=64, max_model_len=64)
    assert run(core, [pooled("a", [3] * 64)])["a"][0].vector is not None
    with pytest.raises(RequestError, match="65 tokens"):
        core.add(pooled("a", [3] * 65))
    core = make_core(blocks=8, capacity="no-evict", max_model_len=64)
    assert run(core, [pooled("a", [3] * 64)])["a"][0].vector is not None


def test_what_a_vector_does_not_go_with_is_refused() -> None:
    core = make_core()
    for params, word in (
        (SamplingParams(n=2), "n,"),
        (SamplingParams(logprobs=1), "logprobs"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
    ):
        with pytest.raises(RequestError, match=word):
            core.add(Request("x", [1], params, pooling="mean"))
    with pytest.raises(RequestError, match="'cls'.*mean, last"):
        core.add(pooled("x", [1], "cls"))
    with pytest.raises(RequestError, match="arrives"):
        core.open(pooled("x", [1]))
    with pytest.raises(RequestError, match="no tokens"):
        core.add(pooled("x", []))
    assert not core.has_work
    assert len(core._pools) == 0


def test_unsound_rows_to_pool_are_refused_by_the_native_back_end() -> None:
    model = tiny_model()
    backend = NativeBackend(model, threads=1)
    backend.allocate_cache(4, 16)
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731
    plan = StepPlan(
        ints(1, 2, 3), ints(0, 1, 2), ints(0, 1, 2), ints(0, 3), ints(3), ints([0]), ints()
    )
    for rows, shape in (
        ([(0, 4)], (1, 32)),
        ([(-1, 2)], (1, 32)),
        ([(2, 1)], (1, 32)),
        ([(0, 3)], (1, 31)),
        ([(0, 3)], (2, 32)),
    ):
        sums = np.zeros(shape)
        with pytest.raises(BackendError):
            backend.run(plan, PooledRows(np.array(rows, np.int32), sums))
        assert not sums.any()
    with pytest.raises(BackendError, match="pool"):
        backend.run(plan, PooledRows(np.array([(0, 3)], np.int64), np.zeros((1, 32))))  # type: ignore[arg-type]
    both = np.zeros((2, 32))
    backend.run(plan, PooledRows(np.array([(0, 3), (1, 1)], np.int32), both))
    assert both[0].any()
    assert not both[1].any()
    backend.close()


def test_offline_and_in_a_loop(smollm2_path: Path) -> None:
    """`embed` of both engines: the same bits, beside answers; and what is aborted says so."""
    texts = ["A cat sits on the mat.", [1, 2, 3], "one " * 50]
    with LLM(smollm2_path, max_model_len=256) as llm:
        found = llm.embed(texts, pooling="last", priority=[1, 2, 3])
        raw = llm.embed(texts[0], normalize=False)[0].outputs.embedding
        with pytest.raises(RequestError, match="257 tokens"):
            llm.embed([[5] * 10, [5] * 257])
        with pytest.raises(RequestError, match="'max'"):
            llm.embed("x", pooling="max")
        assert llm.generate("x")[0].vector is None
    assert found[1].prompt_token_ids == [1, 2, 3]
    assert found[0].metrics is not None
    assert np.linalg.norm(raw) > 2

    async def ask() -> None:
        config = EngineConfig(max_model_len=256)
        async with AsyncEngine(load_engine(smollm2_path, config).core) as engine:
            answer = asyncio.create_task(engine.generate("Once upon a time"))
            vectors = await asyncio.gather(*(engine.embed(each, "last") for each in texts))
            for got, wanted in zip(vectors, found, strict=True):
                assert got.tobytes() == wanted.outputs.embedding.tobytes()
            mean = await engine.embed(texts[0], normalize=False)
            assert mean.tobytes() == raw.tobytes()
            assert (await answer).vector is None
            aborted = engine.pool([3] * 250)
            engine.abort(aborted.request.id)
            with pytest.raises(RequestFailedError, match="aborted"):
                await aborted.vector()

    asyncio.run(ask())
