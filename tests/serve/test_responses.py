"""`/v1/responses` through the official client, and LangChain's chat model on the server."""

from __future__ import annotations

import openai
import pytest
from langchain_openai import ChatOpenAI
from support.http_server import HttpServer

ASK = "Name three colours."


@pytest.fixture(scope="module")
def client(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response_equals_the_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}],
        temperature=0,
        max_tokens=8,
    )
    answer = client.responses.create(
        model="smollm2", instructions="Be brief.", input=ASK, temperature=0, max_output_tokens=8
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 8


def test_a_stream_of_events_adds_up(client: openai.OpenAI) -> None:
    options = {"model": "smollm2", "input": ASK, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].response.output_text == text


def test_a_conversation_goes_on_with_the_answers_own_items(client: openai.OpenAI) -> None:
    first = client.responses.create(model="smollm2", input=ASK, temperature=0, max_output_tokens=8)
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And a fourth?"},
    ]
    again = client.responses.create(
        model="smollm2", input=history, temperature=0, max_output_tokens=8
    )
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_logprobs_on_request(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="smollm2",
        input=ASK,
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    logprobs = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": []}, "input"),
    ],
)
def test_what_cant_be_honoured_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "smollm2", "input": ASK} | fields)
    assert refused.value.param == param


def test_langchains_openai_class(server: HttpServer) -> None:
    model = ChatOpenAI(
        model="smollm2",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_completion_tokens=8,
    )
    whole = model.invoke([("system", "Be brief."), ("human", ASK)])
    streamed = list(model.stream([("system", "Be brief."), ("human", ASK)]))
    assert whole.content
    assert "".join(str(chunk.content) for chunk in streamed) == whole.content
    assert whole.usage_metadata["output_tokens"] == 8  # type: ignore[index]
    assert whole.response_metadata["finish_reason"] == "length"
