"""`/v1/embeddings` of a model that generates, by pooling its rows."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from support.command_line import run
from support.http_server import HttpServer, serving

from trimaran import LLM

CAT, WEATHER, SUN = "A cat sits on the mat.", "It is sunny outside.", "The weather is lovely today."
LONG = "The ship sails on and on. " * 70
FLAGS = ("--max-model-len", "1024", "--kv-cache-bytes", "128MiB", "--warmup", "0")


def post(server: HttpServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)


def vector(server: HttpServer, **body: Any) -> list[float]:
    answer = post(server, **{"pooling": "mean"} | body)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


@pytest.fixture(scope="module")
def offline(smollm2_path: Path) -> dict[str, list[list[float]]]:
    with LLM(smollm2_path, max_model_len=1024) as llm:
        return {
            pooling: [
                each.outputs.embedding.tolist()
                for each in llm.embed([CAT, WEATHER, SUN, LONG], pooling=pooling)
            ]
            for pooling in ("mean", "last")
        }


def test_vectors_by_the_official_client_are_those_of_the_offline_engine(
    server: HttpServer, offline: dict[str, list[list[float]]]
) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for pooling, expected in offline.items():
        found = client.embeddings.create(
            model="smollm2", input=[CAT, WEATHER, SUN, LONG], extra_body={"pooling": pooling}
        )
        assert [each.index for each in found.data] == [0, 1, 2, 3]
        got = np.array([each.embedding for each in found.data], np.float32)
        np.testing.assert_array_equal(got, np.array(expected, np.float32))
        assert np.linalg.norm(got, axis=1) == pytest.approx(np.ones(4), abs=1e-5)
        ids = httpx.post(f"{server.url}/tokenize", json={"prompt": LONG}).json()["tokens"]
        assert found.usage.prompt_tokens == found.usage.total_tokens > len(ids)
        assert vector(server, input=ids, pooling=pooling) == expected[3]
    mean = np.array(offline["mean"])
    assert mean[1] @ mean[2] > mean[0] @ mean[1]


def test_the_fields_are_honoured(server: HttpServer) -> None:
    unit = np.array(vector(server, input=SUN))
    raw = np.array(vector(server, input=SUN, normalize=False))
    assert np.linalg.norm(raw) > 2
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-6)
    short = np.array(vector(server, input=SUN, dimensions=64))
    np.testing.assert_allclose(short, unit[:64] / np.linalg.norm(unit[:64]), atol=1e-6)
    np.testing.assert_array_equal(
        vector(server, input=SUN, dimensions=64, normalize=False), raw[:64]
    )
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": LONG}).json()["tokens"]
    cut = vector(server, input=LONG, truncate_prompt_tokens=9)
    assert cut == vector(server, input=ids[:9])
    assert vector(server, input=SUN, cache_salt="x", priority=3) == unit.tolist()


def test_bad_requests_are_refused_by_name(server: HttpServer) -> None:
    for body, code, param in [
        ({"input": "x"}, "model_not_an_encoder", "pooling"),
        ({"input": "x", "pooling": "cls"}, "unsupported_parameter", "pooling"),
        ({"input": "", "pooling": "mean"}, "invalid_request", None),
        ({"input": "x", "pooling": "mean", "dimensions": 577}, "invalid_value", "dimensions"),
        ({"input": "x", "pooling": "mean", "normalize": 2}, "invalid_value", "normalize"),
        ({"input": [[49_152]], "pooling": "mean"}, "invalid_request", None),
        ({"input": ["x", [1] * 2049], "pooling": "mean"}, "invalid_value", "input"),
        ({"input": [[1], [1] * 2049], "pooling": "mean"}, "invalid_request", None),
    ]:
        answer = post(server, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, code), (body, error)
        assert (error["param"] or "").split(".")[0] == (param or ""), (body, error)
    assert len(vector(server, input=[[1] * 2048])) == 576
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="--pooling"):
        client.embeddings.create(model="smollm2", input="x")


def test_beside_requests_that_generate_nothing_changes_and_all_is_counted(
    server: HttpServer,
) -> None:
    """The same vectors and the same text, batched together; what was computed is found."""
    texts = [f"text number {i} about {'cats' if i % 2 else 'rivers'}" for i in range(24)]
    ask = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    alone = [vector(server, input=text) for text in texts]
    wanted = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60).json()["choices"]
    before = server.metric("vllm:request_success_total", finished_reason="stop")
    tokens = server.metric("vllm:prompt_tokens_total")
    steps = httpx.get(f"{server.url}/debug/state").json()["step"]
    with ThreadPoolExecutor(12) as pool:
        answers = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=ask, timeout=60)
            for _ in range(4)
        ]
        found = list(
            pool.map(
                lambda i: post(server, input=texts[3 * i : 3 * i + 3], pooling="mean"), range(8)
            )
        )
        assert all(answer.result().json()["choices"] == wanted for answer in answers)
    assert [each["embedding"] for a in found for each in a.json()["data"]] == alone
    state = httpx.get(f"{server.url}/debug/state").json()
    assert state["step"] - steps < 24 + 4 * 24
    assert state["blocks"]["held"] == state["server"]["active_requests"] == 0
    assert server.metric("vllm:request_success_total", finished_reason="stop") >= before + 24
    used = sum(answer.json()["usage"]["prompt_tokens"] for answer in found)
    used += sum(answer.result().json()["usage"]["prompt_tokens"] for answer in answers)
    assert server.metric("vllm:prompt_tokens_total") == tokens + used


def test_many_texts_leave_room_for_others_and_end_when_their_client_leaves(
    server: HttpServer,
) -> None:
    gone = threading.Event()

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/embeddings",
                json={"input": [f"{i} {LONG}" for i in range(400)], "pooling": "mean"},
                timeout=httpx.Timeout(60, read=3),
            )
        gone.set()

    thread = threading.Thread(target=leave)
    thread.start()
    most = 0
    while not gone.wait(0.05):
        state = httpx.get(f"{server.url}/debug/state", timeout=30).json()
        most = max(most, state["running"] + state["waiting"])
    thread.join()
    assert 0 < most <= 32
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = httpx.get(f"{server.url}/debug/state", timeout=30).json()
        if state["server"]["active_requests"] == state["blocks"]["held"] == 0:
            break
        time.sleep(0.05)
    assert state["server"]["active_requests"] == state["blocks"]["held"] == 0
    assert state["running"] == state["waiting"] == 0


def test_a_server_that_pools_by_itself_takes_plain_requests_and_logs_their_phases(
    smollm2_path: Path, offline: dict[str, list[list[float]]]
) -> None:
    flags = ("--pooling", "mean", "--log-json", "--max-waiting", "2", "--max-num-seqs", "4")
    with serving("--model", str(smollm2_path), *flags, *FLAGS) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = client.embeddings.create(model=client.models.list().data[0].id, input=SUN)
        assert np.float32(found.data[0].embedding).tolist() == offline["mean"][2]
        assert vector(server, input=SUN, pooling="last") == offline["last"][2]
        # More texts than may wait are one request all the same.
        many = post(server, input=[CAT, WEATHER, SUN] * 20)
        assert [each["embedding"] for each in many.json()["data"]] == offline["mean"][:3] * 20
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    (line,) = [
        each for each in lines if each.get("prompt_tokens") == many.json()["usage"]["prompt_tokens"]
    ]
    assert line["path"] == "/v1/embeddings"
    assert 0 <= line["queue_seconds"] < line["prefill_seconds"] < line["seconds"]
    assert line["finish_reason"] == "stop"
    assert line["output_tokens"] == 0


def test_pooling_that_does_not_fit_is_refused_at_the_start(minilm_path: Path) -> None:
    for flags, words in (
        (("--pooling", "cls"), ["'cls'", "mean, last"]),
        (("--pooling", "last", "--model", str(minilm_path)), ["'last'", "'mean'"]),
    ):
        ended = run("serve", "--port", "0", *flags)
        assert ended.returncode == 2
        assert all(word in ended.stderr for word in words), ended.stderr
