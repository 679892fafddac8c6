"""Prompts that arrive in pieces: the answer is that of the whole prompt, and nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import make_core

from trimaran.core.errors import RequestError, RequestFailedError, TemplateError
from trimaran.core.outputs import RequestOutput
from trimaran.core.request import FinishReason, Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.chat_frame import ChatFrame
from trimaran.engine.collector import OutputCollector
from trimaran.engine.core import EngineCore
from trimaran.models.chat_template import ChatTemplate

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)


def take(collectors: dict[str, OutputCollector], core: EngineCore, events: list) -> None:
    for own in core.assemble(events).values():
        for delta in own:
            collectors[delta.request_id].add(delta)


def alone(prompt: list[int], params: SamplingParams, **options: object) -> RequestOutput:
    core = make_core(**options)  # type: ignore[arg-type]
    collector = OutputCollector("alone", None, prompt, params.n)
    core.add(Request("alone", prompt, params))
    while core.has_work:
        for delta in core.step():
            collector.add(delta)
    return collector.result()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_answer_is_that_of_the_whole_prompt(data: st.DataObject) -> None:
    """Open and ordinary requests together, under memory pressure, aborted at will."""
    options = {
        "max_num_batched_tokens": data.draw(st.integers(3, 20)),
        "prefix_cache": data.draw(st.booleans()),
        "max_num_seqs": data.draw(st.integers(2, 4)),
        "block_size": 4,
        "max_model_len": 48,
        "capacity": data.draw(st.sampled_from(["max-utilization", "no-evict"])),
    }
    core = make_core(blocks=data.draw(st.integers(12, 30)), **options)  # type: ignore[arg-type]
    token = st.integers(0, 255)
    params, prompts, rest, aborted = {}, {}, {}, set()
    collectors: dict[str, OutputCollector] = {}
    for i in range(data.draw(st.integers(1, 5))):
        name, is_open = f"r{i}", data.draw(st.booleans())
        prompt = data.draw(st.lists(token, min_size=1, max_size=30))
        own = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.9])),
            seed=i,
            max_tokens=6,
            logprobs=1,
            n=data.draw(st.integers(1, 1 if options["capacity"] == "no-evict" else 2)),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        )
        params[name], prompts[name] = own, prompt
        collectors[name] = OutputCollector(name, None, prompt, own.n)
        if is_open:
            core.open(Request(name, [], own))
            rest[name] = list(prompt)
        else:
            core.add(Request(name, prompt, own))
    steps = 0
    while core.has_work or rest:
        for name in list(rest):
            action = data.draw(st.sampled_from(["wait", "more", "end", "abort"]))
            if steps > 40:
                action = "end"
            if action == "more":
                size = data.draw(st.integers(0, len(rest[name])))
                take(collectors, core, core.extend(name, rest[name][:size]))
                rest[name] = rest[name][size:]
            elif action == "end":
                take(collectors, core, core.complete(name, rest.pop(name)))
            elif action == "abort":
                aborted.add(name)
                del rest[name]
                take(collectors, core, core.abort(name))
        for delta in core.step():
            collectors[delta.request_id].add(delta)
        core.scheduler.kv.check()
        steps += 1
        assert steps < 2000
    assert core.scheduler.kv.usage().held == 0
    for name, collector in collectors.items():
        if name in aborted:
            assert collector.output.outputs[0].finish_reason is FinishReason.ABORT
            continue
        expected = alone(prompts[name], params[name], max_model_len=48)
        got = collector.result()
        for one, other in zip(got.outputs, expected.outputs, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_what_is_certain_is_computed_before_the_end() -> None:
    core = make_core()
    live = core.open(Request("open", [], PARAMS))
    assert not core.has_work
    prompt = list(range(100))
    core.extend("open", prompt[:90])
    while core.has_work:
        assert core.step() == []
    sequence = live.generations[0].sequence
    assert sequence.computed == 89  # the last one known is needed for the first token
    core.complete("open", prompt[90:])
    (delta,) = core.step()
    assert delta.token_ids == alone(prompt, PARAMS).outputs[0].token_ids[:1]
    assert live.metrics.prompt_complete is not None


def test_an_idle_one_gives_up_its_seat_and_finds_its_prefix_again() -> None:
    core = make_core(max_num_seqs=1)
    prompt = list(range(64))
    live = core.open(Request("open", [], PARAMS))
    core.extend("open", prompt)
    while core.has_work:
        core.step()
    assert core.scheduler.kv.usage().held > 0
    core.add(Request("other", [1, 2, 3], PARAMS))
    core.step()
    assert live.generations[0].sequence.idle
    assert core.scheduler.num_running == 1
    while core.has_work:
        core.step()
    assert core.scheduler.kv.usage().held == 0
    core.complete("open", [7])
    step = core.scheduler.schedule()
    assert step is not None and step.plan.rows == 1 + 64 - 56  # whole blocks of 8 were found


def test_an_idle_one_gives_up_its_blocks_before_anyone_is_preempted() -> None:
    core = make_core(blocks=16, block_size=4, max_model_len=60, prefix_cache=False)
    core.open(Request("open", [], PARAMS))
    core.extend("open", list(range(40)))
    while core.has_work:
        core.step()
    long = core.add(
        Request("long", [5] * 20, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    )
    while core.has_work:
        core.step()
    assert long.metrics.preemptions == 0
    core.complete("open", [1, 2])
    deltas = []
    while core.has_work:
        deltas += core.step()
    expected = alone([*range(40), 1, 2], PARAMS, max_model_len=60)
    assert [t for d in deltas for t in d.token_ids] == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("ids", "message"), [([300], "token id 300"), ([1] * 256, "256 tokens"), ([], "no tokens")]
)
def test_a_bad_prompt_ends_only_its_request(ids: list[int], message: str) -> None:
    core = make_core()
    core.open(Request("bad", [], PARAMS))
    core.add(Request("good", [1, 2], PARAMS))
    events = core.extend("bad", ids) or core.complete("bad", [])
    ((delta,),) = core.assemble(events).values()
    assert delta.finish_reason is FinishReason.ERROR and message in (delta.error or "")
    while core.has_work:
        assert all(d.error is None for d in core.step())


def test_scores_of_a_prompt_that_arrives_are_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        make_core().open(Request("open", [], SamplingParams(prompt_logprobs=1)))


# ---------------------------------------------------------------------- by text, in a loop

TEXT = "The harbour master kept two ledgers; it's <|a|> the 1st.\n  <|start|> Then, nothing"


async def answer(engine: AsyncEngine, pieces: Sequence[str], **options: object) -> list[int]:
    tokens: list[int] = []
    async with engine.open(PARAMS, **options) as request:  # type: ignore[arg-type]
        for piece in pieces:
            request.append(piece)
            await asyncio.sleep(0.002)
        request.finish()
        async for delta in request:
            tokens += delta.token_ids
    return tokens


def test_pieces_of_text_answer_as_the_whole_does() -> None:
    async def main() -> None:
        async with AsyncEngine(make_core()) as engine:
            expected = (await engine.generate(TEXT, PARAMS)).outputs[0].token_ids
            for size in (1, 3, 7, 100):
                pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
                assert await answer(engine, pieces) == expected
            many = await asyncio.gather(*(answer(engine, list(TEXT)) for _ in range(5)))
            assert many == [expected] * 5

    asyncio.run(main())


PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|a|>bot\n"
)
TRIMS = PLAIN.replace("m.content", "m.content | trim")
LOOKS = PLAIN.replace("{{ m.content }}", "{{ 'short' if m.content | length < 9 else m.content }}")
PEEKS = PLAIN.replace("<|a|>bot", "{{ 'polite' if 'please' in messages[-1].content }}<|a|>bot")
TWICE = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")


@pytest.mark.parametrize("source", [PLAIN, TRIMS, PEEKS])
@pytest.mark.parametrize("typed", ["", "  Hello,  there. ", " \n", "Say it, please: 'no' "])
def test_a_growing_chat_message_answers_as_the_whole_does(source: str, typed: str) -> None:
    template = ChatTemplate(source, now=lambda: datetime(2026, 1, 2))
    before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]

    async def main() -> None:
        async with AsyncEngine(make_core()) as engine:
            messages = [*before, {"role": "user", "content": typed}]
            ids = engine.core.tokenizer.encode(template.render(messages))
            expected = (await engine.generate(ids, PARAMS)).outputs[0].token_ids
            for size in (1, 4, 50):
                frame = ChatFrame(template, [*before, {"role": "user", "content": ""}])
                pieces = [typed[i : i + size] for i in range(0, len(typed), size)]
                assert await answer(engine, pieces, chat=frame) == expected

    asyncio.run(main())


@pytest.mark.parametrize("source", [LOOKS, TWICE])
def test_a_template_that_rewrites_the_message_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="last message"):
        ChatFrame(ChatTemplate(source), [{"role": "user", "content": ""}])


def test_one_that_falls_silent_is_given_up_and_frees_all() -> None:
    async def main() -> None:
        core = make_core()
        async with AsyncEngine(core) as engine:
            request = engine.open(PARAMS, idle_seconds=0.15)
            request.append("Some words and more of them ")
            with pytest.raises(RequestFailedError, match="nothing was appended for 0.15 seconds"):
                async for _ in request:
                    pass
            with pytest.raises(RequestError, match="is finished"):
                request.append("late")
            for _ in range(200):
                if not core.is_live(request.id):
                    break
                await asyncio.sleep(0.01)
            assert core.scheduler.kv.usage().held == 0

    asyncio.run(main())


def test_leaving_before_the_end_aborts() -> None:
    async def main() -> None:
        core = make_core()
        async with AsyncEngine(core) as engine:
            async with engine.open(PARAMS) as request:
                request.append("Some words ")
                await asyncio.sleep(0.05)
                assert core.is_live(request.id)
            for _ in range(200):
                if not core.is_live(request.id):
                    break
                await asyncio.sleep(0.01)
            assert not core.is_live(request.id)
            assert core.scheduler.kv.usage().held == 0

    asyncio.run(main())
