"""Requests and answers as JSON records, one a line.

A request has one of "prompt", "prompt_token_ids" and "messages", perhaps an "id", a
"priority" and the "slo" class's name, and any of the sampling parameters. An answer has the
request's id and line number, and either "outputs" or "error". Nothing in a record is
ignored: what isn't known is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from trimaran.core.errors import ParameterError, RequestError, TrimaranError, nearest
from trimaran.core.outputs import Logprobs, RequestOutput
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import slo_class

PROMPTS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants, not yet in tokens.

    Attributes:
        id: the caller's, given back with the answer; None where there was none.
        line: in the input, from 1.
        prompt: text, token ids, or the messages of a conversation.
        chat: whether `prompt` is a conversation.
        priority: smaller is served first with order "priority".
        slo: name of an SLO class.
    """

    id: Any
    line: int
    prompt: str | list[int] | list[dict[str, Any]]
    params: SamplingParams
    chat: bool = False
    priority: int = 0
    slo: str = "standard"


class LineError(TrimaranError):
    """A line of the input is no request.

    Attributes:
        id: the request's, as far as it could be read.
    """

    def __init__(self, message: str, id: Any = None, kind: str = "RequestError") -> None:
        super().__init__(message)
        self.id = id
        self.kind = kind


def parse_line(text: str, line: int, defaults: Mapping[str, Any]) -> Ask:
    """A request from a line of JSON.

    Args:
        defaults: sampling parameters that hold where the line says nothing else.

    Raises:
        LineError: says what is wrong with it.
    """
    try:
        record = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # includes JSONDecodeError
        raise LineError(f"not a JSON object: {_reason(error)}") from None
    if not isinstance(record, dict):
        raise LineError(f'not a JSON object but {_kind(record)}; give {{"prompt": "..."}}')
    identity = record.pop("id", None)
    try:
        return _ask(record, identity, line, defaults)
    except TrimaranError as error:
        raise LineError(str(error), identity, type(error).__name__) from None


def answer_record(ask: Ask, output: RequestOutput) -> dict[str, Any]:
    """The answer to a request, as JSON values."""
    record: dict[str, Any] = {
        "id": ask.id,
        "line": ask.line,
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            | ({} if one.logprobs is None else {"logprobs": [_entry(e) for e in one.logprobs]})
            for one in output.outputs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if entry is None else _entry(entry) for entry in output.prompt_logprobs
        ]
    return record


def error_record(identity: Any, line: int, kind: str, message: str) -> dict[str, Any]:
    """What is written in the place of an answer."""
    return {"id": identity, "line": line, "error": {"type": kind, "message": message}}


def to_json(record: Mapping[str, Any]) -> str:
    """A record on one line; text stays as it is, but for what UTF-8 can't hold."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


# ---------------------------------------------------------------------- reading a record


def _ask(record: dict[str, Any], identity: Any, line: int, defaults: Mapping[str, Any]) -> Ask:
    given = [name for name in PROMPTS if name in record]
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        raise RequestError(f"give one of {', '.join(PROMPTS)}; the record has {what}")
    prompt = record.pop(given[0])
    _PROMPT_CHECKS[given[0]](prompt)
    priority, slo = record.pop("priority", 0), record.pop("slo", "standard")
    if type(priority) is not int:
        raise RequestError(f"priority is {_kind(priority)}; give a whole number")
    slo_class(slo)
    known = [field.name for field in fields(SamplingParams)]
    for name in record:
        if name not in known:
            tail = nearest(name, [*known, *PROMPTS, "id", "priority", "slo"])
            raise RequestError(f"unknown field '{name}'.{tail}")
    params = SamplingParams.from_mapping({**defaults, **_parameters(record)})
    return Ask(identity, line, prompt, params, given[0] == "messages", priority, slo)


def _check_text(prompt: object) -> None:
    if not isinstance(prompt, str):
        raise RequestError(f"prompt is {_kind(prompt)}; give a text")
    check_unicode(prompt, "prompt")


def _check_ids(prompt: object) -> None:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise RequestError("prompt_token_ids isn't a list of whole numbers")


def _check_messages(prompt: object) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("messages isn't a list of at least one message")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError('a message is no object with a "role"')
        if not isinstance(message.get("content"), str):
            raise RequestError('a message has no text as its "content"')
        check_unicode(message["content"], "a message")
        for name in message.keys() - {"role", "content"}:
            raise RequestError(f"a message has the unknown field '{name}'; give role and content")


_PROMPT_CHECKS = {
    "prompt": _check_text,
    "prompt_token_ids": _check_ids,
    "messages": _check_messages,
}


def check_unicode(text: str, what: str) -> None:
    """Whether `text` can be written as UTF-8.

    Raises:
        RequestError: it has half a surrogate pair, or bytes that were no UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} isn't valid Unicode: {text[error.start]!r} at character {error.start}"
        ) from None


def _parameters(record: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters with JSON's types brought to Python's: null means the default."""
    hints = get_type_hints(SamplingParams)
    values = {name: value for name, value in record.items() if value is not None}
    if record.get("max_tokens", 0) is None:
        values["max_tokens"] = None  # here null has a meaning of its own: no limit
    for name, value in values.items():
        if hints[name] is bool and not isinstance(value, bool):
            raise ParameterError(name, f"{name} is {value!r}; give true or false")
    if not isinstance(values.get("stop", ""), str | list):
        raise ParameterError("stop", f"stop is {_kind(values['stop'])}; give a text or a list")
    if not isinstance(values.get("stop_token_ids", []), list):
        raise ParameterError("stop_token_ids", "stop_token_ids isn't a list of whole numbers")
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    return values


def _logit_bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in value.items()}  # JSON's keys are texts
    except (AttributeError, ValueError):
        raise ParameterError(
            "logit_bias",
            'logit_bias isn\'t an object as {"42": -1.5}, token id to addend',
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has '{twice}' twice")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")


# ---------------------------------------------------------------------- writing a record


def _entry(logprobs: Logprobs) -> list[dict[str, Any]]:
    """One position's log-probabilities: the chosen token's first."""
    return [
        {
            "token_id": token,
            "text": one.text,
            "logprob": one.logprob if math.isfinite(one.logprob) else None,
            "rank": one.rank,
        }
        for token, one in logprobs.items()
    ]
