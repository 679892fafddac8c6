"""Traces as a collector gets them, and log lines, against the server's own metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from support.command_line import write_tiny_model
from support.http_server import HttpServer, serving
from support.otlp import Collector, Span, collecting

from trimaran.serve.traces import trace_id_of

SERVER_KIND, INTERNAL_KIND, ERROR = 2, 1, 2
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (CALLER, "0af7651916cd43dd8448eb211c80319c"),
        ("01-" + CALLER[3:] + "-more", "0af7651916cd43dd8448eb211c80319c"),
        ("ff-" + CALLER[3:], None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (CALLER.upper(), None),
        ("", None),
        (None, None),
    ],
)
def test_only_a_sound_traceparent_is_believed(header: str | None, found: str | None) -> None:
    assert trace_id_of(header) == found


def test_spans_of_a_request_are_its_phases(smollm2_path: Path) -> None:
    flags = ("--served-model-name", "smollm2", "--max-model-len", "1024", "--warmup", "1")
    with collecting() as collector:
        endpoint = ("--otlp-endpoint", collector.url, "--log-json")
        with serving(*flags, "--kv-cache-bytes", "128MiB", *endpoint) as server:
            before = time.time_ns()
            answer = _post(server, "completions", {"traceparent": CALLER}, stream=True)
            after = time.time_ns()
            metrics = {name: server.metric(f"vllm:{name}_seconds_sum") for name in TIMES}
            _post(server, "completions", {"traceparent": UNSAMPLED})
            refused = httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 1})
            assert refused.status_code == 400
            _leave(server)
            httpx.get(f"{server.url}/v1/models", headers={"traceparent": CALLER})
            assert server.stop() == 0  # which sends what is left
            lines = _lines(server)
        spans = collector.spans()
    parents = [span for span in spans if span.kind == SERVER_KIND]
    assert len(parents) == 3  # not the one that its caller doesn't sample, nor GET
    (first,) = [span for span in parents if span.trace == CALLER.split("-")[1]]
    assert first.parent == CALLER.split("-")[2]
    assert first.name == "text_completion smollm2"
    assert first.resource["service.name"] == "trimaran"
    assert answer.headers["traceparent"] == f"00-{first.trace}-{first.id}-01"
    assert before <= first.begin < first.end <= after + 10**9
    _check_phases(first, spans, metrics)
    _check_attributes(first)
    _check_lines(lines, first, metrics)
    (bad,) = [span for span in parents if span.attributes.get("error.type") == "400"]
    assert not [span for span in spans if span.parent == bad.id]
    (left,) = [span for span in parents if span.attributes.get("error.type") not in (None, "400")]
    assert left.attributes["error.type"] == "client_disconnected"
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_a_realtime_session_is_a_span_with_the_phases_of_its_answers(smollm2_path: Path) -> None:
    flags = ("--served-model-name", "smollm2", "--max-model-len", "512", "--warmup", "0")

    async def talk(server: HttpServer) -> str:
        url = server.url.replace("http", "ws", 1) + "/v1/realtime"
        headers = {"traceparent": CALLER}
        async with websockets.connect(url, additional_headers=headers) as socket:

            async def until(kind: str) -> None:
                found = ""
                while found != kind:
                    event = json.loads(await asyncio.wait_for(socket.recv(), 60))
                    found = event["type"]
                    assert found != "error", event

            session = {"type": "realtime", "temperature": 0, "max_output_tokens": 5}
            await socket.send(json.dumps({"type": "session.update", "session": session}))
            await until("session.updated")
            for text in ("Tell me of the sea.", "And of the sky, please."):
                for word in text.split():
                    event = {"type": "input_text_buffer.append", "text": word + " "}
                    await socket.send(json.dumps(event))
                    await asyncio.sleep(0.02)
                await socket.send(json.dumps({"type": "response.create"}))
                await until("response.done")
            await socket.send(json.dumps({"type": "input_text_buffer.append", "text": "never "}))
            assert socket.response is not None
            return socket.response.headers["traceparent"]

    with collecting() as collector:
        endpoint = ("--otlp-endpoint", collector.url, "--log-json")
        with serving(*flags, "--kv-cache-bytes", "64MiB", *endpoint) as server:
            told = asyncio.run(talk(server))
            with contextlib.suppress(websockets.InvalidStatus, websockets.ConnectionClosed):
                asyncio.run(_knock(server))
            assert server.stop() == 0
            lines = _lines(server)
        spans = collector.spans()
    (session,) = [span for span in spans if span.parent == CALLER.split("-")[2]]
    assert told == f"00-{session.trace}-{session.id}-01"
    assert (session.kind, session.name) == (SERVER_KIND, "chat smollm2")
    assert session.attributes["http.response.status_code"] == 101
    assert session.attributes["gen_ai.usage.output_tokens"] == 10
    assert "error.type" not in session.attributes
    children = [span for span in spans if span.parent == session.id]
    assert (
        sorted(span.name for span in children) == ["decode"] * 2 + ["prefill"] * 2 + ["queue"] * 2
    )
    assert all(session.begin <= each.begin <= each.end <= session.end for each in children)
    (line,) = [each for each in lines if each.get("trace_id") == session.trace]
    assert (line["method"], line["output_tokens"]) == ("WEBSOCKET", 10)
    assert line["prompt_tokens"] == session.attributes["gen_ai.usage.input_tokens"]
    (other,) = [s for s in spans if s.kind == SERVER_KIND and s.id != session.id]
    assert other.attributes["error.type"] == "403"


async def _knock(server: HttpServer) -> None:
    """From a page that may not."""
    url = server.url.replace("http", "ws", 1) + "/v1/realtime"
    async with websockets.connect(url, origin="http://else.where") as socket:  # type: ignore[arg-type]
        await socket.recv()


TIMES = (
    "request_queue_time",
    "request_prefill_time",
    "request_decode_time",
    "time_to_first_token",
)


def _post(
    server: HttpServer, endpoint: str, headers: dict[str, str], **more: Any
) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "seed": 7, **more}
    answer = httpx.post(f"{server.url}/v1/{endpoint}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    return answer


def _leave(server: HttpServer) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as running:
        next(running.iter_lines())
    deadline = time.monotonic() + 10
    while not server.metric("vllm:request_success_total", finished_reason="abort"):
        assert time.monotonic() < deadline


def _check_phases(span: Span, spans: list[Span], metrics: dict[str, float]) -> None:
    children = {each.name: each for each in spans if each.parent == span.id}
    assert set(children) == {"queue", "prefill", "decode"}
    for name, child in children.items():
        assert child.kind == INTERNAL_KIND and child.trace == span.trace
        assert span.begin <= child.begin <= child.end <= span.end
        assert child.seconds == pytest.approx(metrics[f"request_{name}_time"], abs=2e-6)
    assert children["queue"].end == children["prefill"].begin
    assert children["prefill"].end == children["decode"].begin
    assert span.events == {"trimaran.first_token": children["decode"].begin}
    assert children["decode"].attributes["gen_ai.usage.output_tokens"] == 24


def _check_attributes(span: Span) -> None:
    found = span.attributes
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.provider.name"] == "trimaran"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "smollm2"
    assert found["gen_ai.request.max_tokens"] == 24
    assert found["gen_ai.request.seed"] == 7
    assert found["gen_ai.usage.output_tokens"] == 24
    assert found["gen_ai.usage.input_tokens"] > found["gen_ai.usage.cache_read.input_tokens"] >= 0
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.latency.e2e"] == pytest.approx(span.seconds, abs=1e-3)
    assert "error.type" not in found and span.status != ERROR


def _check_lines(lines: list[dict[str, Any]], span: Span, metrics: dict[str, float]) -> None:
    (line,) = [line for line in lines if line.get("trace_id") == span.trace and "model" in line]
    assert line["request_id"] == span.attributes["trimaran.request.id"]
    assert (line["model"], line["finish_reason"], line["output_tokens"]) == (
        "smollm2",
        "length",
        24,
    )
    for name in ("queue", "prefill", "decode"):
        assert line[f"{name}_seconds"] == pytest.approx(metrics[f"request_{name}_time"], abs=2e-6)
    assert line["cached_tokens"] == span.attributes["gen_ai.usage.cache_read.input_tokens"]
    (unsampled,) = [line for line in lines if line.get("trace_id") == UNSAMPLED.split("-")[1]]
    assert unsampled["output_tokens"] == 24
    (refused,) = [line for line in lines if line.get("status") == 400]
    assert refused["request_id"] and "output_tokens" not in refused


def _lines(server: HttpServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]


def test_a_collector_that_isnt_there_harms_nobody(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with serving(*_tiny(tmp_path), "--otlp-endpoint", endpoint) as server:
            for _ in range(3):
                _post(server, "completions", {}, prompt="abc")
            begin = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin < 20


def test_without_the_extra_the_option_is_refused_with_what_to_do(tmp_path: Path) -> None:
    absent = "import sys\nsys.modules['opentelemetry.sdk'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(absent)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    flags = (*_tiny(tmp_path), "--otlp-endpoint", "http://localhost:4318")
    with serving(*flags, env=env, wait=False) as server:
        assert server.process.wait(30) == 2
        assert "pip install 'trimaran[otel]'" in server.log
    with serving(*_tiny(tmp_path), "--otlp-endpoint", "localhost:4318", wait=False) as server:
        assert server.process.wait(30) == 2
        assert re.search(r"otlp_endpoint is 'localhost:4318'.*http://", server.log)


def test_every_span_of_many_requests_has_its_place(tmp_path: Path) -> None:
    with collecting() as collector:
        with serving(*_tiny(tmp_path), "--otlp-endpoint", collector.url) as server:
            for prompts in (["abc"], ["abc", "cab", "fed"]):
                _post(server, "completions", {}, prompt=prompts, max_tokens=3)
            assert server.stop() == 0
        _check_tree(collector)


def test_who_leaves_from_the_queue_was_in_the_queue(smollm2_path: Path) -> None:
    with collecting() as collector:
        flags = ("--max-num-seqs", "1", "--otlp-endpoint", collector.url, "--max-model-len", "2048")
        with serving(*flags, "--log-json") as server:
            long = {"prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            url = f"{server.url}/v1/completions"
            with httpx.stream("POST", url, json=long, timeout=60) as running:
                lines = running.iter_lines()
                next(lines)
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(url, json={"prompt": "cab"}, timeout=0.3)
            deadline = time.monotonic() + 10
            while server.metric("vllm:request_success_total", finished_reason="abort") < 2:
                assert time.monotonic() < deadline
            assert server.stop() == 0
            (line,) = [line for line in _lines(server) if line.get("output_tokens") == 0]
        spans = collector.spans()
    assert 0.2 < line["queue_seconds"] < 5 and "prefill_seconds" not in line
    first, second = sorted((s for s in spans if s.kind == SERVER_KIND), key=lambda s: s.begin)
    assert {s.name for s in spans if s.parent == first.id} == {"queue", "prefill", "decode"}
    (queue,) = [s for s in spans if s.parent == second.id]
    assert queue.name == "queue" and second.begin <= queue.begin < queue.end <= second.end
    assert queue.seconds == pytest.approx(line["queue_seconds"], abs=1e-5)
    assert second.attributes["error.type"] == "client_disconnected"


def test_refusals_have_their_id_in_the_log_too(tmp_path: Path) -> None:
    flags = (*_tiny(tmp_path), "--log-json", "--api-key", "key", "--max-body-bytes", "1000")
    with serving(*flags) as server:
        url = f"{server.url}/v1/completions"
        key = {"Authorization": "Bearer key"}
        for number, (headers, body, method, status) in enumerate(
            (
                ({}, b"{}", "POST", 401),
                (key, b"{}", "POST", 400),
                (key, b" " * 2000, "POST", 413),
                (key, b"", "GET", 405),
            )
        ):
            headers = headers | {"x-request-id": f"refused-{number}"}
            answer = httpx.request(method, url, content=body, headers=headers)
            assert answer.status_code == status
            assert answer.headers["x-request-id"] == f"refused-{number}"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.settimeout(5)
            client.sendall(b"nonsense\r\n\r\n")
            told = re.search(rb"400 .*x-request-id: (\w+)", client.recv(1000), re.DOTALL)
        assert told is not None
        assert server.stop() == 0
        assert [
            line["status"] for line in _lines(server) if line.get("request_id") == told[1].decode()
        ] == [400]
        logged = {line.get("request_id"): line.get("status") for line in _lines(server)}
        wanted = [401, 400, 413, 405]
        assert [logged[f"refused-{number}"] for number in range(4)] == wanted


def _check_tree(collector: Collector) -> None:
    spans = collector.spans()
    own = {span.id: span for span in spans if span.kind == SERVER_KIND}
    assert len(own) == 2 and len({span.trace for span in own.values()}) == 2
    below: dict[str, list[str]] = {}
    for span in spans:
        if span.kind != SERVER_KIND:
            assert span.trace == own[span.parent].trace
            below.setdefault(span.parent, []).append(span.name)
    assert sorted(len(names) for names in below.values()) == [3, 9]  # three a prompt


def _tiny(folder: Path) -> tuple[str, ...]:
    path = folder / "tiny.gguf"
    if not path.exists():
        write_tiny_model(folder)
    return ("--model", str(path), "--backend", "reference", "--warmup", "0")
