"""`/openapi.json` against the server that gives it: schemathesis makes requests from it, sound
ones and others, and no answer may differ from what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.command_line import write_tiny_model
from support.hostile import Residue
from support.http_server import HttpServer, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
GENERATING = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def described(model: Path) -> Iterator[HttpServer]:
    with serving("--model", str(model), "--backend", "reference", "--warmup", "0") as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=["sound", "unsound"])
def test_no_request_made_from_the_description_surprises_the_server(
    described: HttpServer, mode: GenerationMode
) -> None:
    residue = Residue(described)
    schema = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    seen: set[tuple[str, int]] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue

        @settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(mode))
        def ask(case: schemathesis.Case) -> None:
            answer = case.call(timeout=60)
            case.validate_response(answer, checks=CHECKS)
            seen.add((case.operation.path, answer.status_code))

        ask()
    assert {(path, 400) for path in GENERATING} <= seen
    residue.assert_none(memory=256 << 20)


def test_answers_are_as_described(described: HttpServer) -> None:
    """Sound requests by hand: what is made at random rarely fits a model of twelve tokens."""
    schema = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    chat = [{"role": "user", "content": "abc"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 2, "n": 2, "logprobs": True},
        "/v1/completions": {"prompt": ["abc", "d"], "max_tokens": 2, "logprobs": 1},
        "/v1/responses": {"input": "abc", "max_output_tokens": 2},
        "/v1/messages": {"model": "tiny", "messages": chat, "max_tokens": 2},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": chat},
        "/tokenize": {"prompt": "abc"},
        "/detokenize": {"tokens": [3, 4]},
    }
    asked = set()
    for path, body in bodies.items():
        operation = schema[path]["POST"]
        for stream in (False, True) if path in GENERATING else (None,):
            sent = body if stream is None else body | {"stream": stream}
            case = operation.Case(body=sent, media_type="application/json")
            answer = case.call(timeout=60)
            assert answer.status_code == 200, answer.text
            case.validate_response(answer, checks=CHECKS)
            kind = "text/event-stream" if stream else "application/json"
            assert answer.headers["content-type"][0].startswith(kind)
        for status, broken in ((400, body | {"nonsense": 1}), (404, body | {"model": "another"})):
            case = operation.Case(body=broken, media_type="application/json")
            answer = case.call(timeout=60)
            assert answer.status_code == status
            case.validate_response(answer, checks=CHECKS)
        asked.add(path)
    embeddings = schema["/v1/embeddings"]["POST"]
    for sent, status in (
        ({"input": "abc", "pooling": "mean", "normalize": False}, 200),
        ({"input": "abc"}, 400),  # for the model generates
    ):
        case = embeddings.Case(body=sent, media_type="application/json")
        answer = case.call(timeout=60)
        assert answer.status_code == status
        case.validate_response(answer, checks=CHECKS)
    asked.add("/v1/embeddings")
    posts = {path for path, methods in schema.raw_schema["paths"].items() if "post" in methods}
    assert posts == asked


def test_errors_are_declared_and_so_is_the_key(model: Path) -> None:
    with serving(
        *("--model", str(model), "--backend", "reference", "--warmup", "0"),
        *("--api-key", "secret", "--max-body-bytes", "10k"),
    ) as keyed:
        found = httpx.get(f"{keyed.url}/openapi.json").json()
        for path in GENERATING:
            operation = found["paths"][path]["post"]
            statuses = {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"}
            assert operation["responses"].keys() == statuses
            assert operation["responses"]["200"]["content"].keys() == {
                "application/json",
                "text/event-stream",
            }
            assert operation["security"] == [{"bearer": []}, {"header": []}]
            of_anthropic = path == "/v1/messages"
            for headers, content, status in (
                ({}, b"{}", 401),
                ({"x-api-key": "secret"}, b"{}", 400),
                ({"x-api-key": "secret"}, b" " * 20_000, 413),
            ):
                answer = httpx.post(f"{keyed.url}{path}", content=content, headers=headers)
                assert answer.status_code == status
                assert (answer.json().get("type") == "error") == of_anthropic
                assert answer.json()["error"]["message"]
        assert found["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
        assert "security" not in found["paths"]["/health"]["get"]
