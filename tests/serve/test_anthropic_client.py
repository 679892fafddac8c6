"""The official `anthropic` client against a running server on the real model."""

from __future__ import annotations

import anthropic
import httpx
import pytest
from support.http_server import HttpServer

SYSTEM = "You answer in one sentence."
GREEDY = {"temperature": 0}
ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: HttpServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_an_answer_equals_that_of_the_openai_interface(
    client: anthropic.Anthropic, server: HttpServer
) -> None:
    answer = client.messages.create(
        model="smollm2", max_tokens=24, extra_body=GREEDY, system=SYSTEM, messages=ASK
    )
    other = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "messages": [{"role": "system", "content": SYSTEM}, *ASK],
            "temperature": 0,
            "max_tokens": 24,
        },
        timeout=60,
    ).json()
    assert answer.content[0].text == other["choices"][0]["message"]["content"]  # type: ignore[union-attr]
    usage = answer.usage
    assert usage.output_tokens == other["usage"]["completion_tokens"]
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert total == other["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model="smollm2", system=SYSTEM, messages=ASK)
    assert counted.input_tokens == total
    expected = {"length": "max_tokens", "stop": "end_turn"}
    assert answer.stop_reason == expected[other["choices"][0]["finish_reason"]]


def test_a_stream_adds_up_to_the_whole_answer(client: anthropic.Anthropic) -> None:
    options = {"model": "smollm2", "max_tokens": 16, "extra_body": GREEDY, "messages": ASK}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="smollm2", max_tokens=64, extra_body=GREEDY, messages=ASK, stop_sequences=["France"]
    )
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "France"
    assert "France" not in answer.content[0].text


def test_the_answer_goes_on_from_the_assistants_own_words(client: anthropic.Anthropic) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.messages.create(
        model="smollm2", max_tokens=3, extra_body=GREEDY, messages=begun
    )
    assert answer.content[0].text.startswith(" Paris")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"extra_body": {"what": 1}}, "what"),
    ],
)
def test_refusals_have_anthropics_shape(
    client: anthropic.Anthropic, fields: dict[str, object], what: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=what) as refused:
        client.messages.create(**{"model": "smollm2", "max_tokens": 4, "messages": ASK} | fields)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-9", max_tokens=4, messages=ASK)
