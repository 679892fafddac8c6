"""Requests and answers as JSON: everything is honoured or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.cli.records import LineError, answer_record, error_record, parse_line, to_json
from trimaran.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trimaran.core.request import FinishReason
from trimaran.core.sampling_params import SamplingParams

DEFAULTS = {"max_tokens": 256}


def refusal(record: Any) -> LineError:
    with pytest.raises(LineError) as caught:
        parse_line(record if isinstance(record, str) else json.dumps(record), 1, DEFAULTS)
    return caught.value


def test_a_prompt_with_parameters() -> None:
    ask = parse_line('{"id": 7, "prompt": "a", "temperature": 0, "stop": "x"}', 3, DEFAULTS)
    assert (ask.id, ask.line, ask.prompt, ask.chat) == (7, 3, "a", False)
    assert ask.params == SamplingParams(max_tokens=256, temperature=0, stop=("x",))


def test_what_the_line_says_goes_before_the_flags() -> None:
    defaults = {"max_tokens": 9, "temperature": 0.5}
    params = parse_line('{"prompt": "a", "max_tokens": 2}', 1, defaults).params
    assert (params.max_tokens, params.temperature) == (2, 0.5)


def test_token_ids_and_messages() -> None:
    assert parse_line('{"prompt_token_ids": [1, 2]}', 1, {}).prompt == [1, 2]
    messages = [{"role": "user", "content": "hi"}]
    ask = parse_line(json.dumps({"messages": messages}), 1, {})
    assert ask.chat
    assert ask.prompt == messages


def test_json_types_become_pythons() -> None:
    line = '{"prompt": "a", "logit_bias": {"5": -1}, "seed": null, "max_tokens": null}'
    params = parse_line(line, 1, DEFAULTS).params
    assert params == SamplingParams(logit_bias={5: -1}, seed=None, max_tokens=None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not a JSON object: Expecting property name"),
        ("", "not a JSON object: Expecting value"),
        ("[" * 100_000, "nested too deep"),
        ("3", "not a JSON object but a number"),
        ('"text"', "not a JSON object but a text"),
        ('{"prompt": "a", "prompt": "b"}', "it has 'prompt' twice"),
        ({"id": 1}, "give one of prompt, prompt_token_ids, messages; the record has none"),
        ({"prompt": "a", "messages": []}, "the record has prompt and messages"),
        ({"prompt": 5}, "prompt is a number; give a text"),
        ({"prompt": "a\ud800"}, "isn't valid Unicode: '\\ud800' at character 1"),
        ({"prompt_token_ids": "ab"}, "isn't a list of whole numbers"),
        ({"prompt_token_ids": [1, True]}, "isn't a list of whole numbers"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, 'no object with a "role"'),
        ({"messages": [{"role": "user"}]}, 'no text as its "content"'),
        ({"messages": [{"role": "user", "content": "a", "nme": 1}]}, "unknown field 'nme'"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'. Did you mean 'temp"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "ignore_eos": "no"}, "ignore_eos is 'no'; give true or false"),
        ({"prompt": "a", "stop": 5}, "stop is a number; give a text or a list"),
        ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids isn't a list"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias isn't an object"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias isn't an object"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens is 3, above max_tokens"),
    ],
)
def test_what_is_refused(record: Any, message: str) -> None:
    assert message in str(refusal(record))


def test_a_refusal_keeps_the_id_and_the_class_of_error() -> None:
    error = refusal({"id": "x", "prompt": "a", "top_p": 2})
    assert (error.id, error.kind) == ("x", "ParameterError")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(
    ["id", "prompt", "prompt_token_ids", "messages", *SamplingParams.__dataclass_fields__]
)


@given(st.dictionaries(names, json_values, max_size=4) | json_values)
def test_any_json_is_taken_or_refused(record: Any) -> None:
    try:
        parse_line(json.dumps(record), 1, DEFAULTS)
    except LineError as error:
        assert str(error)


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        parse_line(text, 1, DEFAULTS)
    except LineError as error:
        assert str(error)


def test_an_answer() -> None:
    ask = parse_line('{"id": [1], "prompt": "a"}', 4, DEFAULTS)
    logprobs = [{9: Logprob(-0.5, 1, "é"), 2: Logprob(float("-inf"), 2, "b")}]
    one = CompletionOutput(0, "é", [9], logprobs, -0.5, FinishReason.STOP, 9)
    output = RequestOutput("llm-0", "a", [1, 2], [one], None, True, RequestMetrics(0.0))
    record = answer_record(ask, output)
    assert json.loads(to_json(record)) == {
        "id": [1],
        "line": 4,
        "outputs": [
            {
                "index": 0,
                "text": "é",
                "token_ids": [9],
                "finish_reason": "stop",
                "stop_reason": 9,
                "logprobs": [
                    [
                        {"token_id": 9, "text": "é", "logprob": -0.5, "rank": 1},
                        {"token_id": 2, "text": "b", "logprob": None, "rank": 2},
                    ]
                ],
            }
        ],
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": 1,
    }
    assert "é" in to_json(record)  # not escaped


def test_an_error() -> None:
    record = error_record("x", 2, "RequestError", "no")
    assert to_json(record) == (
        '{"id": "x", "line": 2, "error": {"type": "RequestError", "message": "no"}}'
    )


def test_priority_and_class_of_a_request() -> None:
    ask = parse_line('{"prompt": "a", "priority": -3, "slo": "batch"}', 1, {})
    assert (ask.priority, ask.slo) == (-3, "batch")
    plain = parse_line('{"prompt": "a"}', 1, {})
    assert (plain.priority, plain.slo) == (0, "standard")
    assert "slo is 'fast'; give one of interactive" in str(refusal({"prompt": "a", "slo": "fast"}))
    for bad in ("high", 1.5, True, None):
        assert "priority is" in str(refusal({"prompt": "a", "priority": bad}))
