"""The official `openai` client against a running server on the real model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from support.http_server import HttpServer

from trimaran import LLM, SamplingParams

COLOURS = [{"role": "user", "content": "Name three colours."}]
PARIS = "The capital of France is"


@pytest.fixture(scope="module")
def client(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline(smollm2_path: Path):
    """The same model without a server: what its answers must equal."""
    with LLM(smollm2_path, max_model_len=2048, kv_cache_bytes=256 << 20) as llm:
        yield llm


def test_a_chat_is_answered_as_offline(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.chat(COLOURS, SamplingParams(temperature=0, max_tokens=32))
    answer = client.chat.completions.create(
        model="smollm2", messages=COLOURS, temperature=0, max_tokens=32
    )
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="smollm2", messages=COLOURS, temperature=0, max_completion_tokens=24
    )
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=COLOURS,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_choices_in_one_stream(client: openai.OpenAI) -> None:
    options = {"model": "smollm2", "messages": COLOURS, "n": 3, "seed": 7, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert len(set(texts.values())) > 1, "three random choices are hardly the same"


def test_log_probabilities_are_those_of_the_engine(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    (expected,) = offline.chat(COLOURS, params)
    answer = client.chat.completions.create(
        model="smollm2",
        messages=COLOURS,
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    own = expected.outputs[0]
    assert own.logprobs is not None
    for token, found, entry in zip(own.token_ids, content, own.logprobs, strict=True):
        assert found.logprob == entry[token].logprob
        assert [top.logprob for top in found.top_logprobs] == sorted(
            (e.logprob for e in entry.values() if e.rank <= 3), reverse=True
        )


def test_completions_of_several_prompts_in_every_form(client: openai.OpenAI, offline: LLM) -> None:
    ids = offline.tokenizer.encode(PARIS)
    greedy = {"model": "smollm2", "temperature": 0, "max_tokens": 6}
    (expected,) = offline.generate(PARIS, SamplingParams(temperature=0, max_tokens=6))
    for prompt in (PARIS, ids, [PARIS, PARIS], [ids, ids]):
        answer = client.completions.create(prompt=prompt, **greedy)
        number = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        assert [choice.text for choice in answer.choices] == [expected.text] * number
        assert [choice.index for choice in answer.choices] == list(range(number))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == number * len(ids)
        assert answer.usage.completion_tokens == number * 6


def test_echo_scores_the_prompt(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (expected,) = offline.generate(PARIS, params)
    answer = client.completions.create(
        model="smollm2", prompt=PARIS, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == PARIS
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert expected.prompt_logprobs is not None
    scores = [
        entry[token].logprob
        for token, entry in zip(expected.prompt_token_ids, expected.prompt_logprobs, strict=True)
        if entry is not None
    ]
    assert choice.logprobs.token_logprobs[1:] == scores
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_stop_seed_bias_and_penalties_are_honoured(client: openai.OpenAI, offline: LLM) -> None:
    bias_to = offline.tokenizer.encode(" blue")[0]
    biased = client.completions.create(
        model="smollm2", prompt=PARIS, max_tokens=3, temperature=0, logit_bias={str(bias_to): 100}
    )
    assert biased.choices[0].text == " blue blue blue"
    stopped = client.completions.create(
        model="smollm2", prompt=PARIS, max_tokens=20, temperature=0, stop=["."]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "." not in stopped.choices[0].text
    drawn = [
        client.completions.create(model="smollm2", prompt=PARIS, max_tokens=16, seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = (answer.choices[0].text for answer in drawn)
    assert first == again != other


def test_vllms_own_fields(client: openai.OpenAI, server: HttpServer) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=COLOURS,
        max_tokens=8,
        extra_body={"top_k": 1, "min_p": 0.1, "ignore_eos": True, "prompt_logprobs": 1},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.model_extra is not None
    assert len(answer.model_extra["prompt_logprobs"]) == answer.usage.prompt_tokens  # type: ignore[union-attr]


def test_the_class_and_the_retention_of_a_request_reach_the_engine(
    client: openai.OpenAI, server: HttpServer
) -> None:
    def count() -> float:
        return server.metric("trimaran:slo_requests_total", slo="interactive")

    before = count()
    fields = {"slo": "interactive", "retention": {"priority": 90, "seconds": 60}}
    for ask in (
        lambda: client.chat.completions.create(
            model="smollm2", messages=COLOURS, max_tokens=2, extra_body=fields
        ),
        lambda: client.completions.create(
            model="smollm2", prompt=PARIS, max_tokens=2, extra_body=fields
        ),
    ):
        ask()
    assert count() == before + 2
    for bad, param in (({"slo": "gold"}, "slo"), ({"retention": {"priority": 101}}, "retention")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="smollm2", prompt=PARIS, extra_body=bad)
        assert str(refused.value.param).startswith(param)


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "A prompt that comes twice, long enough for several blocks of the cache. " * 8
    options = {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
    usages = [
        client.completions.create(**options, extra_body={"cache_salt": "of this test"}).usage
        for _ in range(2)
    ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage]  # type: ignore[union-attr]
    assert cached[0] == 0
    assert usages[0] is not None
    assert usages[0].prompt_tokens - 17 <= cached[1] < usages[0].prompt_tokens


def test_models_are_listed_and_others_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=COLOURS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"blue": 1}}, "logit_bias"),
        ({"extra_body": {"tempratur": 1}}, "tempratur"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"store": True}, "store"),
    ],
)
def test_what_cant_be_honoured_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, object], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "smollm2", "messages": COLOURS} | fields)
    if param is None:
        assert str(refused.value.param).startswith("messages.0")
    else:
        assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2047"):
        client.completions.create(model="smollm2", prompt=[1] * 3000)
    with pytest.raises(openai.BadRequestError, match="token id"):
        client.completions.create(model="smollm2", prompt=[1_000_000])


def test_many_tasks_at_once_get_the_same_answers(server: HttpServer) -> None:
    """Batch invariance, seen from outside."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(i: int) -> str:
                text = ""
                stream = await client.completions.create(
                    model="smollm2",
                    prompt=f"Number {i % 4}: once upon a time",
                    temperature=0,
                    max_tokens=24,
                    stream=True,
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return list(await asyncio.gather(*(one(i) for i in range(24))))

    texts = asyncio.run(ask())
    assert texts == texts[:4] * 6
    alone = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "Number 2: once upon a time", "temperature": 0, "max_tokens": 24},
        timeout=60,
    ).json()
    assert alone["choices"][0]["text"] == texts[2]


def test_tokenize_and_back(server: HttpServer, offline: LLM) -> None:
    def post(path: str, body: dict[str, object]) -> dict[str, object]:
        found: dict[str, object] = httpx.post(f"{server.url}{path}", json=body).json()
        return found

    text = "Größe: 10 µm 🌊"
    found = post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == offline.tokenizer.encode(text)
    assert found["count"] == len(found["tokens"])  # type: ignore[arg-type]
    assert post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": text}
    chat = post("/tokenize", {"messages": COLOURS})
    rendered = offline.tokenizer.encode(offline.render_chat(COLOURS), add_special_tokens=False)
    assert chat["tokens"] == rendered


def test_the_last_message_of_the_assistant_can_be_continued(
    client: openai.OpenAI, offline: LLM
) -> None:
    messages = [*COLOURS, {"role": "assistant", "content": "1. Violet\n2."}]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=messages,
        temperature=0,
        max_tokens=8,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    text = offline.render_chat(COLOURS) + "1. Violet\n2."
    ids = offline.tokenizer.encode(text, add_special_tokens=False)
    (expected,) = offline.generate([ids], SamplingParams(temperature=0, max_tokens=8))
    assert answer.choices[0].message.content == expected.text
