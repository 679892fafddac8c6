"""What `/openapi.json` tells of answers: their shapes, the errors, and the keys.

Bodies of requests are pydantic models in `schema/`, which FastAPI describes by itself; answers
are written as plain objects, so their schemas stand here, and a test compares them with what
the server answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from trimaran.serve.middleware import OPEN_PATHS

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
WHOLE: Json = {"type": "integer"}
OBJECT: Json = {"type": "object"}
MAYBE_TEXT: Json = {"type": ["string", "null"]}
MAYBE_OBJECT: Json = {"type": ["object", "null"]}


def describe(api: FastAPI, keyed: bool) -> Callable[[], Json]:
    """The function that makes the description once and keeps it.

    Args:
        keyed: whether requests must carry a key.
    """
    made: list[Json] = []

    def openapi() -> Json:
        if not made:
            found = get_openapi(
                title=api.title, version=api.version, summary=api.summary, routes=api.routes
            )
            _complete(found, keyed)
            made.append(found)
        return made[0]

    return openapi


def _complete(found: Json, keyed: bool) -> None:
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # errors have OpenAI's shape here, and the status 400
    schemas |= _SCHEMAS
    if keyed:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            _operation(path, method, operation, keyed and path not in OPEN_PATHS)


def _operation(path: str, method: str, operation: Json, keyed: bool) -> None:
    answers: Json = {}
    success = _SUCCESS.get(path)
    if success is not None:
        answers["200"] = {
            "description": "The answer.",
            "content": {
                media: {"schema": schema if schema in (OBJECT, TEXT) else _ref(schema)}
                for media, schema in success.items()
            },
        }
    else:
        answers["200"] = {"description": "As it should be."}
    error = _ref("AnthropicError" if path.startswith("/v1/messages") else "Error")
    for status in _statuses(path, method, operation, keyed):
        answers[status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": error}},
        }
    if path == "/ready":
        answers["503"]["content"]["application/json"]["schema"] = _ref("Ready")
    operation["responses"] = answers
    if keyed:
        operation["security"] = [{"bearer": []}, {"header": []}]


def _statuses(path: str, method: str, operation: Json, keyed: bool) -> list[str]:
    found = []
    if operation.get("parameters") or method == "post":
        found.append("400")
    if keyed:
        found.append("401")
    if method == "post" or "{" in path:
        found.append("404")
    if method == "post":
        found += ["408", "413"]
    if path in _GENERATING or path == "/v1/embeddings":
        found += ["429", "500", "504"]
    if path not in ("/version", "/metrics"):
        found.append("503")
    return found


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _object(text: str, /, **properties: Json) -> Json:
    """All properties are there; more may come."""
    return {
        "type": "object",
        "description": text,
        "properties": properties,
        "required": list(properties),
    }


def _just(value: str) -> Json:
    return {"type": "string", "const": value}


_ERRORS = {
    "400": "The request is at fault; the message says how, `param` where.",
    "401": "No valid key came with the request.",
    "404": "There is no such model.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "429": "More requests wait than this server takes; see the header Retry-After.",
    "500": "The request failed inside the server.",
    "503": "The model is being loaded, or the server shuts down.",
    "504": "The request took longer than this server allows.",
}

_GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)

_JSON, _EVENTS = "application/json", "text/event-stream"
_SUCCESS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {_JSON: "ChatCompletion", _EVENTS: "Event"},
    "/v1/completions": {_JSON: "Completion", _EVENTS: "Event"},
    "/v1/responses": {_JSON: "Response", _EVENTS: "Event"},
    "/v1/messages": {_JSON: "AnthropicAnswer", _EVENTS: "Event"},
    "/v1/messages/count_tokens": {_JSON: "TokenCount"},
    "/v1/embeddings": {_JSON: "Embeddings"},
    "/v1/models": {_JSON: "ModelList"},
    "/v1/models/{name}": {_JSON: "Model"},
    "/tokenize": {_JSON: "Tokens"},
    "/detokenize": {_JSON: "Text"},
    "/ready": {_JSON: "Ready"},
    "/version": {_JSON: "Version"},
    "/metrics": {"text/plain": TEXT},
    "/debug/state": {_JSON: OBJECT},
    "/debug/blocks": {_JSON: "BlockMap"},
}

_USAGE = {"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "total_tokens": WHOLE}
_SCHEMAS: dict[str, Json] = {
    "Error": _object(
        "An error in OpenAI's shape.",
        error=_object(
            "What was wrong.", message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT
        ),
    ),
    "Event": {
        "type": "object",
        "description": "A server-sent event; its data are JSON, but for the last, `[DONE]`.",
        "properties": {"event": TEXT, "data": TEXT},
        "required": ["data"],
    },
    "AnthropicError": _object(
        "An error in Anthropic's shape.",
        type=_just("error"),
        error=_object("What was wrong.", type=TEXT, message=TEXT),
    ),
    "Usage": _object("Tokens.", **_USAGE, prompt_tokens_details=OBJECT),
    "ChatCompletion": _object(
        "An answer to a conversation; with `stream`, events of the type chat.completion.chunk.",
        id=TEXT,
        object=_just("chat.completion"),
        created=WHOLE,
        model=TEXT,
        choices=_list(
            _object(
                "One of `n` answers.",
                index=WHOLE,
                message=_object("The answer.", role=_just("assistant"), content=TEXT),
                logprobs=MAYBE_OBJECT,
                finish_reason=TEXT,
            )
        ),
        usage=_ref("Usage"),
    ),
    "Completion": _object(
        "Continued texts; with `stream`, events of the same type.",
        id=TEXT,
        object=_just("text_completion"),
        created=WHOLE,
        model=TEXT,
        choices=_list(
            _object(
                "One of `n` continuations of a prompt.",
                index=WHOLE,
                text=TEXT,
                logprobs=MAYBE_OBJECT,
                finish_reason=TEXT,
            )
        ),
        usage=_ref("Usage"),
    ),
    "Response": _object(
        "An answer; with `stream`, events of the types response.*.",
        id=TEXT,
        object=_just("response"),
        created_at=WHOLE,
        status=TEXT,
        error=MAYBE_OBJECT,
        incomplete_details=MAYBE_OBJECT,
        model=TEXT,
        output=_list(OBJECT),
        usage=_object("Tokens.", input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "AnthropicAnswer": _object(
        "An answer to a conversation; with `stream`, Anthropic's events.",
        id=TEXT,
        type=_just("message"),
        role=_just("assistant"),
        model=TEXT,
        content=_list(_object("A block of text.", type=_just("text"), text=TEXT)),
        stop_reason=TEXT,
        stop_sequence=MAYBE_TEXT,
        usage=_object("Tokens.", input_tokens=WHOLE, output_tokens=WHOLE),
    ),
    "TokenCount": _object("Tokens of a prompt.", input_tokens=WHOLE),
    "Model": _object(
        "A model.", id=TEXT, object=_just("model"), created=WHOLE, max_model_len=WHOLE
    ),
    "ModelList": _object("Models.", object=_just("list"), data=_list(_ref("Model"))),
    "Embeddings": _object(
        "A vector for each text.",
        object=_just("list"),
        model=TEXT,
        data=_list(_object("One of them.", object=_just("embedding"), index=WHOLE)),
        usage=_object("Tokens.", prompt_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "Tokens": _object(
        "Token ids of a text.", count=WHOLE, max_model_len=WHOLE, tokens=_list(WHOLE)
    ),
    "Text": _object("The text of token ids.", prompt=TEXT),
    "Ready": _object("Whether requests are taken.", status=TEXT),
    "Version": _object("The version of Trimaran.", version=TEXT),
    "BlockMap": _object("The KV blocks.", blocks_per_cell=WHOLE, cells=_list(_list(WHOLE))),
}
