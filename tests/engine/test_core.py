"""The step loop on a tiny model: everything a request can ask, against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import make_core, tiny_model

from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.errors import RequestError
from trimaran.core.outputs import RequestOutput, SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.core.retention import Retention
from trimaran.core.sampling_batch import Float32
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.engine.collector import OutputCollector
from trimaran.engine.core import EngineCore

PROMPT = [72, 101, 108, 108, 111]


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | values))


def run(core: EngineCore, *requests: Request) -> list[RequestOutput]:
    """Adds all requests at once and steps until none is left."""
    collectors = {r.id: OutputCollector(r.id, None, r.prompt, r.params.n) for r in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for delta in core.step():
            collectors[delta.request_id].add(delta)
        core.scheduler.kv.check()
    usage = core.scheduler.kv.usage()
    assert usage.held == 0, "a request that ended still holds blocks"
    return [collectors[r.id].result() for r in requests]


def one(prompt: list[int], params: SamplingParams, **options: Any) -> RequestOutput:
    return run(make_core(**options), Request("one", prompt, params))[0]


def naive_greedy(prompt: list[int], count: int) -> list[int]:
    """Computes the whole prefix anew for every token."""
    tokens = list(prompt)
    for _ in range(count):
        backend = ReferenceBackend(tiny_model())
        backend.allocate_cache(16, 32)
        rows = np.arange(len(tokens), dtype=np.int32)
        plan = StepPlan(
            tokens=np.array(tokens, np.int32),
            positions=rows,
            slots=rows,
            row_starts=np.array([0, len(tokens)], np.int32),
            contexts=np.array([len(tokens)], np.int32),
            block_tables=np.arange(16, dtype=np.int32)[None],
            logit_rows=rows[-1:],
        )
        tokens.append(int(backend.run(plan)[0].argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_computing_everything_anew() -> None:
    output = one(PROMPT, greedy())
    assert output.outputs[0].token_ids == naive_greedy(PROMPT, 12)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 50),
    st.sampled_from([4, 8, 16, 32]),
    st.integers(64 // 4, 80),
    st.sampled_from([None, "hash", "radix"]),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_tokens_and_logprobs_never_depend_on_company_chunks_blocks_or_preemption(
    prompts: list[list[int]],
    budget: int,
    block_size: int,
    blocks: int,
    index: str | None,
    sampled: bool,
    scored: int | None,
) -> None:
    params = SamplingParams(
        temperature=0.8 if sampled else 0.0,
        seed=5,
        max_tokens=8,
        logprobs=2,
        prompt_logprobs=scored,
    )
    prompts = prompts + [[*prompt[: len(prompt) // 2 + 1], 7, 7] for prompt in prompts[:2]]
    core = make_core(
        blocks=blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        prefix_cache=index is not None,
        index=index or "hash",
        max_model_len=64,
    )
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    for request, output in zip(requests, run(core, *requests), strict=True):
        alone = one(request.prompt, params, max_model_len=64)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs  # bit for bit
        assert output.prompt_logprobs == alone.prompt_logprobs


def test_a_second_run_hits_the_prefix_cache_and_changes_nothing() -> None:
    core = make_core()
    prompt = list(range(40))
    (first,) = run(core, Request("a", prompt, greedy(logprobs=1)))
    (second,) = run(core, Request("b", prompt, greedy(logprobs=1)))
    assert first.cached_tokens == 0
    assert second.cached_tokens == 32  # whole blocks of 8, one token left to compute
    assert second.outputs[0].logprobs == first.outputs[0].logprobs


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_with_the_trie_a_second_run_computes_one_token_of_the_prompt(block_size: int) -> None:
    core = make_core(blocks=2048 // block_size, block_size=block_size, index="radix")
    prompt = [3 * i % 256 for i in range(83)]
    (first,) = run(core, Request("a", prompt, greedy(logprobs=1)))
    (second,) = run(core, Request("b", prompt, greedy(logprobs=1)))
    assert (first.cached_tokens, second.cached_tokens) == (0, 82)
    assert second.outputs[0].logprobs == first.outputs[0].logprobs
    answer = first.outputs[0].token_ids  # all but the last of which is computed
    (longer,) = run(core, Request("c", [*prompt, *answer, 9], greedy()))
    assert longer.cached_tokens == 83 + 11
    (parted,) = run(core, Request("d", [*prompt[:41], 255, *prompt[42:]], greedy()))
    assert parted.cached_tokens == 41


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_cached_tokens_are_those_of_the_first_admission(index: str) -> None:
    core = make_core(blocks=14, block_size=4, max_model_len=50, index=index)
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    prompt = list(range(18))
    run(core, Request("a", prompt, greedy(max_tokens=1)))
    (output,) = run(core, Request("b", prompt, params))
    assert output.metrics is not None and output.metrics.preemptions > 0
    assert output.cached_tokens == (17 if index == "radix" else 16)
    usage = core.scheduler.kv.usage()
    assert (usage.queried_tokens, usage.hit_tokens) == (36, output.cached_tokens)
    assert usage.resumed_tokens > 0


def test_a_retention_outlives_the_prompts_of_others() -> None:
    for retention, hit in ((None, 0), (Retention(90), 16)):
        core = make_core(blocks=8, block_size=8, max_model_len=64)
        run(core, Request("a", [1] * 20, greedy(max_tokens=1), retention=retention))
        for i in range(4):
            run(core, Request("b", [2 + i] * 30, greedy(max_tokens=1)))
        (again,) = run(core, Request("c", [1] * 20, greedy(max_tokens=1)))
        assert again.cached_tokens == hit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adapter": "french"}, "adapter 'french'"),
        ({"cache_salt": 7}, "cache_salt is 7"),
        ({"retention": 80}, r"retention is 80; give Retention"),
    ],
)
def test_what_a_request_says_of_the_cache_is_honoured_or_refused(
    values: dict[str, Any], message: str
) -> None:
    core = make_core()
    with pytest.raises(RequestError, match=message):
        core.add(Request("bad", PROMPT, greedy(), **values))
    run(core, Request("odd", PROMPT, greedy(), cache_salt="\ud800"))


def test_salts_do_not_share_prefixes() -> None:
    core = make_core()
    prompt = list(range(40))
    run(core, Request("a", prompt, greedy(), cache_salt="tenant-1"))
    (other,) = run(core, Request("b", prompt, greedy(), cache_salt="tenant-2"))
    assert other.cached_tokens == 0


def test_n_sequences_share_the_prompt_and_differ_by_seed() -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, logprobs=0)
    core = make_core()
    (together,) = run(core, Request("n", PROMPT * 3, params))
    again = one(PROMPT * 3, params, max_num_batched_tokens=7)
    texts = [tuple(o.token_ids) for o in together.outputs]
    assert len(set(texts)) == 4
    assert texts == [tuple(o.token_ids) for o in again.outputs]
    # The first sequence is what n = 1 gives.
    single = one(PROMPT * 3, SamplingParams(temperature=1.0, seed=3, max_tokens=10))
    assert single.outputs[0].token_ids == together.outputs[0].token_ids


def test_n_under_memory_pressure_gives_the_same() -> None:
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    roomy = one(PROMPT, params)
    tight_core = make_core(blocks=14, block_size=4, max_model_len=50)
    (tight,) = run(tight_core, Request("n", PROMPT, params))
    assert tight.metrics is not None
    assert tight.metrics.preemptions > 0
    assert [o.token_ids for o in tight.outputs] == [o.token_ids for o in roomy.outputs]


def test_prompt_logprobs_are_those_of_the_definition() -> None:
    output = one(PROMPT, greedy(prompt_logprobs=3, max_tokens=1), max_num_batched_tokens=2)
    entries = output.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(PROMPT)
    for position in range(1, len(PROMPT)):
        scored = one(PROMPT[:position], greedy(max_tokens=1, logprobs=3)).outputs[0].logprobs
        assert scored is not None
        entry = entries[position]
        assert entry is not None
        assert next(iter(entry)) == PROMPT[position]
        top = sorted(entry.values(), key=lambda found: found.rank)[:3]
        assert top == sorted(scored[0].values(), key=lambda found: found.rank)[:3]


def test_stop_token_stop_string_and_eos() -> None:
    tokens = naive_greedy(PROMPT, 12)
    stopped = one(PROMPT, greedy(stop_token_ids=[tokens[4]])).outputs[0]
    first = tokens.index(tokens[4])
    assert stopped.token_ids == tokens[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.stop_reason == tokens[4]
    late = one(PROMPT, greedy(stop_token_ids=[tokens[4]], min_tokens=first + 2)).outputs[0]
    assert len(late.token_ids) > first + 1
    text = one(PROMPT, greedy()).outputs[0].text
    place = 3
    cut = one(PROMPT, greedy(stop=text[place : place + 2])).outputs[0]
    assert cut.text == text[: text.find(text[place : place + 2])]
    assert cut.stop_reason == text[place : place + 2]
    forced = one(PROMPT, greedy(logit_bias={257: 1e4})).outputs[0]
    assert forced.token_ids == [257]
    assert (forced.text, forced.stop_reason) == ("", None)
    ignored = one(PROMPT, greedy(logit_bias={257: 1e4}, ignore_eos=True)).outputs[0]
    assert ignored.token_ids == [257] * 12


def test_max_tokens_none_fills_the_context() -> None:
    output = one(PROMPT, greedy(max_tokens=None, ignore_eos=True), max_model_len=30)
    assert len(output.outputs[0].token_ids) == 30 - len(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "no tokens"),
        ([1] * 256, SamplingParams(), "256 tokens"),
        ([1, 260], SamplingParams(), "token id 260"),
        ([1, -1], SamplingParams(), "token id -1"),
        ([1], SamplingParams(n=65), "n is 65"),
        ([1], SamplingParams(logit_bias={260: 1.0}), "logit_bias has token id 260"),
        ([1], SamplingParams(stop_token_ids=[999]), "stop_token_ids has token id 999"),
    ],
)
def test_what_can_never_be_served_is_refused(
    prompt: list[int], params: SamplingParams, message: str
) -> None:
    core = make_core()
    with pytest.raises(RequestError, match=message):
        core.add(Request("bad", prompt, params))
    assert not core.has_work


def test_an_id_in_use_is_refused() -> None:
    core = make_core()
    core.add(Request("same", PROMPT, greedy()))
    with pytest.raises(RequestError, match="'same' is already in use"):
        core.add(Request("same", PROMPT, greedy()))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_abort_at_any_time_frees_everything_and_disturbs_nobody(data: st.DataObject) -> None:
    core = make_core(blocks=12, block_size=4, max_num_batched_tokens=9, max_model_len=40)
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=20), min_size=2, max_size=5)
    )
    params = [greedy(n=data.draw(st.integers(1, 3)), max_tokens=6) for _ in prompts]
    collectors = {}
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        core.add(Request(f"r{i}", prompt, own))
        collectors[f"r{i}"] = OutputCollector(f"r{i}", None, prompt, own.n)
    victims = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=3))
    ended: list[str] = []
    deltas: list[SequenceDelta] = []
    while core.has_work:
        if victims and data.draw(st.booleans()):
            for own in core.assemble(core.abort(f"r{victims.pop()}")).values():
                deltas += own
        deltas += core.step()
        core.scheduler.kv.check()
    for delta in deltas:
        if collectors[delta.request_id].add(delta):
            ended.append(delta.request_id)
    assert core.scheduler.kv.usage().held == 0
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        output = collectors[f"r{i}"].output
        reasons = {o.finish_reason for o in output.outputs}
        if FinishReason.ABORT in reasons:
            continue
        assert output.finished
        alone = one(prompt, own, max_model_len=40)
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in alone.outputs]


class FaultyBackend(ReferenceBackend):
    """Fails on a token, or makes a row of NaN on another: a model with a poisoned input."""

    CRASH, NAN = 200, 201

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        if self.CRASH in plan.tokens:
            raise RuntimeError("poisoned")
        logits = super().run(plan, pooled).copy()
        for i, row in enumerate(plan.logit_rows):
            if plan.tokens[row] == self.NAN:
                logits[i] = np.nan
        return logits


def test_a_row_that_cannot_be_sampled_ends_only_its_request() -> None:
    core = make_core(FaultyBackend(tiny_model()))
    collectors = {}
    for name, prompt in (("good", PROMPT), ("bad", [1, FaultyBackend.NAN]), ("also", [5, 6])):
        core.add(Request(name, prompt, greedy()))
        collectors[name] = OutputCollector(name, None, prompt, 1)
    while core.has_work:
        for delta in core.step():
            collectors[delta.request_id].add(delta)
    assert "NaN" in (collectors["bad"].error or "")
    for name, prompt in (("good", PROMPT), ("also", [5, 6])):
        assert collectors[name].result().outputs[0].token_ids == naive_greedy(prompt, 12)
    assert core.scheduler.kv.usage().held == 0


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    core = make_core(FaultyBackend(tiny_model()))
    core.add(Request("bad", [1, FaultyBackend.CRASH], greedy()))
    deltas = core.step()
    assert [d.finish_reason for d in deltas] == [FinishReason.ERROR]
    assert "poisoned" in (deltas[0].error or "")
    (good,) = run(core, Request("good", PROMPT, greedy()))
    assert good.outputs[0].token_ids == naive_greedy(PROMPT, 12)
