"""`/v1/embeddings` of all-MiniLM-L6-v2, by OpenAI's own client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import schemathesis
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI
from schemathesis.specs.openapi.checks import response_schema_conformance
from support.http_server import HttpServer, serving

CAT, WEATHER, SUN = "A cat sits on the mat.", "It is sunny outside.", "The weather is lovely today."


@pytest.fixture(scope="module")
def encoder(minilm_path: Path) -> Iterator[HttpServer]:
    # Threads of numpy's that wait for each other make it slow where other tests run.
    env = {"OPENBLAS_NUM_THREADS": "1"}
    with serving("--model", str(minilm_path), "--max-queue", "8", env=env) as server:
        yield server


@pytest.fixture(scope="module")
def client(encoder: HttpServer) -> OpenAI:
    return OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0)


def post(server: HttpServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)


def test_vectors_by_the_official_client(client: OpenAI) -> None:
    """Which asks for base64, and decodes it."""
    found = client.embeddings.create(model="all-minilm-l6-v2", input=[CAT, WEATHER, SUN])
    cat, weather, sun = (np.array(each.embedding) for each in found.data)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert cat.shape == (384,)
    assert weather @ sun > 0.5 > cat @ weather
    assert found.usage.prompt_tokens == found.usage.total_tokens == 24
    plain = client.embeddings.create(
        model="all-minilm-l6-v2", input=SUN, encoding_format="float"
    ).data[0]
    np.testing.assert_array_equal(np.array(plain.embedding, np.float32), sun.astype(np.float32))


def test_ids_are_texts_too_and_dimensions_are_kept(encoder: HttpServer) -> None:
    ids = httpx.post(f"{encoder.url}/tokenize", json={"prompt": SUN}).json()["tokens"]
    whole = post(encoder, input=SUN).json()["data"][0]["embedding"]
    for given in (ids, [ids], [SUN]):
        assert post(encoder, input=given).json()["data"][0]["embedding"] == whole
    short = np.array(post(encoder, input=SUN, dimensions=64).json()["data"][0]["embedding"])
    first = np.array(whole[:64])
    np.testing.assert_allclose(short, first / np.linalg.norm(first), atol=1e-6)
    coded = post(encoder, input=SUN, dimensions=64, encoding_format="base64").json()
    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, short, atol=1e-7)


def test_long_texts_are_refused_or_cut(encoder: HttpServer) -> None:
    long = "word " * 400
    error = post(encoder, input=long).json()["error"]
    assert "402 tokens" in error["message"]
    cut = post(encoder, input=long, truncate_prompt_tokens=-1).json()
    assert cut["usage"]["prompt_tokens"] == 256
    assert cut["data"] == post(encoder, input="word " * 254).json()["data"]
    assert (
        post(encoder, input=long, truncate_prompt_tokens=10).json()["usage"]["prompt_tokens"] == 10
    )


def test_bad_requests_are_refused_by_name(encoder: HttpServer, client: OpenAI) -> None:
    for body, code, param in [
        ({}, "missing_required_parameter", "input"),
        ({"input": ""}, None, None),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input"),
        ({"input": 3}, "invalid_value", "input"),
        ({"input": "x", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "x", "dimensions": 385}, "invalid_value", "dimensions"),
        ({"input": "x", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "x", "pooling": "cls"}, "unsupported_parameter", "pooling"),
        ({"input": "x", "normalize": False}, "unsupported_parameter", "normalize"),
        ({"input": "x", "truncate_prompt_tokens": 2}, "invalid_value", "truncate_prompt_tokens"),
        ({"input": [99_999_999]}, "invalid_request", None),
        ({"input": "x", "temperature": 0}, "unknown_parameter", "temperature"),
        ({"input": ["x"] * 2049}, "invalid_value", "input"),
    ]:
        answer = post(encoder, **body)
        if code is None:  # an empty text still has the tokens around it
            assert answer.status_code == 200
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, code), (body, error)
        assert (error["param"] or "").split(".")[0] == (param or ""), (body, error)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


def test_a_full_server_says_when_to_come_again(encoder: HttpServer) -> None:
    texts = ["word " * 100] * 6
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: post(encoder, input=texts), range(24)))
    refused = [answer for answer in answers if answer.status_code == 429]
    served = [answer for answer in answers if answer.status_code == 200]
    assert refused
    assert served
    assert len(refused) + len(served) == 24
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert post(encoder, input=["x"] * 300).status_code == 200


def test_the_engines_own_limit_refuses_too_but_no_request_for_its_own_texts(
    minilm_path: Path,
) -> None:
    flags = ("--max-waiting", "1", "--max-num-seqs", "4", "--warmup", "0", "--log-json")
    env = {"OPENBLAS_NUM_THREADS": "1"}
    with serving("--model", str(minilm_path), *flags, env=env) as server:
        assert post(server, input=["word " * 20] * 60).status_code == 200
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: post(server, input=["word " * 200] * 2), range(16)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.status_code for answer in answers} == {200, 429}
        rejections = server.metric("vllm:admission_rejections_total", reason="max_waiting")
        assert rejections >= len(refused)
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    line = next(each for each in lines if each.get("prompt_tokens") == 60 * 22)
    assert 0 <= line["queue_seconds"] < line["prefill_seconds"] < line["seconds"]
    assert (line["finish_reason"], line["output_tokens"]) == ("stop", 0)


def test_langchains_class(encoder: HttpServer) -> None:
    found = OpenAIEmbeddings(
        model="all-minilm-l6-v2",
        base_url=f"{encoder.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    ).embed_documents([CAT, SUN])
    own = [each["embedding"] for each in post(encoder, input=[CAT, SUN]).json()["data"]]
    np.testing.assert_allclose(found, own, atol=1e-7)


def test_an_encoder_generates_nothing_and_says_so(encoder: HttpServer, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="all-minilm-l6-v2", messages=[{"role": "user", "content": "x"}]
        )
    assert refused.value.code == "model_not_generative"
    answer = httpx.post(f"{encoder.url}/v1/completions", json={"prompt": "x"})
    assert answer.json()["error"]["code"] == "model_not_generative"
    assert httpx.get(f"{encoder.url}/health").status_code == 200
    assert client.models.list().data[0].id == "all-minilm-l6-v2"


def test_requests_together_are_batched_counted_and_leave_nothing(encoder: HttpServer) -> None:
    texts = [f"text number {i} about {'cats' if i % 2 else 'rivers'}" for i in range(24)]
    alone = [post(encoder, input=text).json()["data"][0]["embedding"] for text in texts]
    before = encoder.metric("vllm:request_success_total", finished_reason="stop")
    tokens = encoder.metric("vllm:prompt_tokens_total")
    steps = httpx.get(f"{encoder.url}/debug/state").json()["step"]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: post(encoder, input=texts[3 * i : 3 * i + 3]), range(8)))
    got = [each["embedding"] for answer in found for each in answer.json()["data"]]
    assert got == alone
    state = httpx.get(f"{encoder.url}/debug/state").json()
    assert state["step"] - steps < 24
    assert state["blocks"]["held"] == state["server"]["active_requests"] == 0
    assert encoder.metric("vllm:request_success_total", finished_reason="stop") == before + 24
    used = sum(answer.json()["usage"]["prompt_tokens"] for answer in found)
    assert encoder.metric("vllm:prompt_tokens_total") == tokens + used


def test_answers_are_as_described(encoder: HttpServer) -> None:
    schema = schemathesis.openapi.from_url(f"{encoder.url}/openapi.json")
    operation = schema["/v1/embeddings"]["POST"]
    for body, status in (
        ({"input": ["a", "b"]}, 200),
        ({"input": "a", "encoding_format": "base64"}, 200),
        ({"input": "a", "nonsense": 1}, 400),
        ({"input": "a", "model": "another"}, 404),
    ):
        case = operation.Case(body=body, media_type="application/json")
        answer = case.call(timeout=60)
        assert answer.status_code == status
        case.validate_response(answer, checks=[response_schema_conformance])
