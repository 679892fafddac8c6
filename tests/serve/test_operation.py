"""Keys, CORS, TLS, limits, ids, readiness and the drain, on servers of their own."""

from __future__ import annotations

import json
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.command_line import write_tiny_model
from support.http_server import HttpServer, open_files, serving

BODY = {"prompt": "abc", "max_tokens": 4}
SMALL = ("--max-model-len", "2048", "--kv-cache-bytes", "256MiB", "--warmup", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def keyed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# of the tests\nsecond-key\n")
    with serving(
        *(*_model(tiny), "--api-key", "first-key", "--api-key-file", str(keys)),
        *("--cors-origin", "https://page.example", "--root-path", "/llm", "--log-json"),
        *("--max-body-bytes", "100k", "--body-timeout", "1", "--header-timeout", "1"),
    ) as server:
        yield server


def test_each_key_opens_and_others_dont(keyed: HttpServer) -> None:
    url = f"{keyed.url}/v1/completions"
    for headers in (
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer second-key"},
        {"x-api-key": "second-key"},
    ):
        assert httpx.post(url, json=BODY, headers=headers).status_code == 200
    for headers in ({}, {"Authorization": "Bearer first"}, {"x-api-key": "first-key2"}):
        refused = httpx.post(url, json=BODY, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert httpx.get(f"{keyed.url}{path}").status_code == 200
    assert httpx.get(f"{keyed.url}/v1/models").status_code == 401


def test_cors_answers_the_preflight_of_that_origin_only(keyed: HttpServer) -> None:
    def preflight(origin: str) -> httpx.Response:
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        return httpx.options(f"{keyed.url}/v1/completions", headers=headers)

    allowed = preflight("https://page.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in preflight("https://other.example").headers


def test_request_ids_come_back_and_are_logged(keyed: HttpServer) -> None:
    headers = {"x-request-id": "trace-me-1", "x-api-key": "first-key"}
    answer = httpx.post(f"{keyed.url}/v1/completions", json=BODY, headers=headers)
    assert answer.headers["x-request-id"] == "trace-me-1"
    lines = [json.loads(line) for line in keyed.log.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == "trace-me-1"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/llm/v1/completions", 200)
    forged = httpx.get(f"{keyed.url}/version", headers={"x-request-id": "x" * 300})
    assert len(forged.headers["x-request-id"]) == 32


def test_a_body_is_limited_in_size_and_time(keyed: HttpServer) -> None:
    url, headers = f"{keyed.url}/v1/completions", {"x-api-key": "first-key"}
    told = httpx.post(url, content=b" " * 200_000, headers=headers)
    assert told.status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    try:
        untold = httpx.post(url, content=chunks(), headers=headers)
        assert untold.status_code == 413
    except httpx.WriteError:  # the server closed before all was sent, as it may
        pass
    host, port = keyed.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: first-key\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        slow.settimeout(5)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


def test_headers_are_limited_in_size_number_and_time(keyed: HttpServer) -> None:
    host, port = keyed.url.removeprefix("http://").split(":")

    def first_line(*parts: bytes) -> bytes:
        with socket.create_connection((host, int(port))) as client:
            client.settimeout(5)
            try:
                for part in parts:
                    client.sendall(part)
                return client.recv(1000).split(b"\r\n")[0]
            except ConnectionError:
                return b""

    start = b"GET /version HTTP/1.1\r\nhost: x\r\n"
    assert first_line(start + b"\r\n").startswith(b"HTTP/1.1 200")
    assert first_line(start + b"a: " + b"b" * 200_000) in (b"", b"HTTP/1.1 431 ")
    assert first_line(start + b"a: b\r\n" * 300 + b"\r\n") in (b"", b"HTTP/1.1 431 ")
    assert first_line(start) == b"HTTP/1.1 408 "
    assert first_line(b"") == b"HTTP/1.1 408 "
    assert first_line(b"\x00\xff nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_unreadable_bodies_are_told_apart(server: HttpServer) -> None:
    url = f"{server.url}/v1/chat/completions"
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (b"{", b"\xff\xfe", b"[]", b"null", b"", deep, b'{"n": ' + b"9" * 10_000 + b"}"):
        answer = httpx.post(url, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body[:20]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    nan = httpx.post(
        url,
        content=b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        headers={"content-type": "application/json"},
    )
    assert nan.status_code == 400
    half = httpx.post(
        url,
        content=b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}',
        headers={"content-type": "application/json"},
    )
    assert half.status_code == 400
    assert httpx.get(f"{server.url}/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(url).status_code == 405


def _certificate(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A certificate for this machine, and the flags of a server that has it."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}",
        shell=True,
        check=True,
        capture_output=True,
    )
    return cert, ("--tls-cert", str(cert), "--tls-key", str(key))


def test_https(tiny: Path, tmp_path: Path) -> None:
    cert, flags = _certificate(tmp_path)
    with serving(*_model(tiny), *flags) as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=cert)
        answer = httpx.get(f"{server.url}/v1/models", verify=trust)
        assert answer.json()["data"][0]["id"] == "tiny"
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        for plain in (head, b"\x16\x03\x01\x00\x05hello", b""):  # no handshake, half, none
            with socket.create_connection(address, timeout=10) as raw:
                raw.sendall(plain)
                raw.shutdown(socket.SHUT_WR)
                assert b"HTTP" not in raw.recv(1000)
        for _ in range(50):  # the request comes with the last of the handshake
            raw = socket.create_connection(address, timeout=10)
            with trust.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
                secure.sendall(head)
                assert secure.recv(12) == b"HTTP/1.1 200"
        assert "Traceback" not in server.log


def test_silent_handshakes_are_connections_with_little_time(tiny: Path, tmp_path: Path) -> None:
    cert, flags = _certificate(tmp_path)
    limits = ("--max-connections", "12", "--header-timeout", "8", "--no-access-log")
    with serving(*_model(tiny), *flags, *limits) as server:
        trust = ssl.create_default_context(cafile=cert)
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        assert httpx.get(f"{server.url}/version", verify=trust).status_code == 200
        time.sleep(0.5)  # that connection is gone
        before = open_files(server)
        begin = time.monotonic()
        silent = [socket.create_connection(address, timeout=10) for _ in range(40)]
        try:
            refused = [raw for raw in silent[12:] if _closed(raw, 1.0)]
            assert len(refused) == 28
            assert time.monotonic() - begin < 7
            assert not any(_closed(raw, 0.0) for raw in silent[:12])
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/version", verify=trust)
            assert all(_closed(raw, 20.0) for raw in silent[:12])
            assert 7 < time.monotonic() - begin < 20
        finally:
            for raw in silent:
                raw.close()
        assert httpx.get(f"{server.url}/version", verify=trust).status_code == 200
        deadline = time.monotonic() + 5
        while open_files(server) > before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with socket.create_connection(address, timeout=10):  # and holds up no end
            begin = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin < 7
        assert "Traceback" not in server.log


def _closed(raw: socket.socket, seconds: float) -> bool:
    """Whether the other side closes the connection within so many seconds."""
    if not select.select([raw], [], [], seconds)[0]:
        return False
    try:
        return raw.recv(1) == b""
    except ConnectionError:
        return True


def test_a_full_queue_answers_429_with_a_hint(smollm2_path: Path) -> None:
    with serving(*SMALL, "--max-queue", "2") as server:
        url = f"{server.url}/v1/completions"
        long = {"prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=long, timeout=60) as running:
            lines = running.iter_lines()  # kept: without it httpx would close the connection
            next(lines)
            refused = httpx.post(url, json=BODY)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        deadline = time.monotonic() + 5
        while httpx.post(url, json=BODY).status_code != 200:
            assert time.monotonic() < deadline, "the queue isn't free after its client left"
            time.sleep(0.05)


def test_health_is_answered_while_loading_and_a_taken_port_is_told(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with serving(*_model(tiny), "--port", port, wait=False) as server:
            assert server.process.wait(30) == 2
            assert f"can't listen on 127.0.0.1:{port}" in server.log


def test_a_model_that_isnt_there_ends_the_server(tmp_path: Path) -> None:
    with serving("--model", str(tmp_path / "none.gguf"), wait=False) as server:
        assert server.process.wait(30) == 1
        assert "none.gguf" in server.log


def test_sigterm_lets_running_requests_end(server_of_its_own: HttpServer) -> None:
    server = server_of_its_own
    seen: list[str] = []

    def read() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            seen.extend(line for line in answer.iter_lines() if line)

    reading = threading.Thread(target=read)
    reading.start()
    while not seen:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{server.url}/v1/completions", json=BODY)
    reading.join(60)
    assert server.process.wait(30) == 0
    assert seen[-1] == "data: [DONE]"
    last = json.loads(seen[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_second_signal_ends_at_once(server_of_its_own: HttpServer) -> None:
    server = server_of_its_own
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            list(lines)
    assert server.process.wait(5) == 128 + signal.SIGTERM


def test_what_outlasts_the_drain_is_cut_off(smollm2_path: Path) -> None:
    with serving("--max-model-len", "8192", "--drain-timeout", "0.5") as server:
        body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(10) == 0


@pytest.fixture
def server_of_its_own(smollm2_path: Path) -> Iterator[HttpServer]:
    with serving(*SMALL) as own:
        yield own


def test_a_client_that_leaves_frees_its_blocks(server: HttpServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    for stream in (True, False):
        before = server.metric("vllm:request_success_total", finished_reason="abort")
        with socket.create_connection(_address(server)) as client:
            content = json.dumps(body | {"stream": stream}).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(content), content)
            )
            deadline = time.monotonic() + 10
            while server.metric("vllm:num_requests_running") == 0:
                assert time.monotonic() < deadline
        left = time.monotonic()
        while server.metric("vllm:num_requests_running") or server.metric(
            "vllm:kv_cache_usage_perc"
        ):
            assert time.monotonic() < left + 2, "the request runs on without its client"
        assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 1


def test_a_request_has_its_time(smollm2_path: Path) -> None:
    with serving(*SMALL, "--request-timeout", "0.3") as own:
        body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True}
        whole = httpx.post(f"{own.url}/v1/completions", json=body, timeout=30)
        assert whole.status_code == 504
        assert whole.headers["x-should-retry"] == "false"
        streamed = httpx.post(f"{own.url}/v1/completions", json=body | {"stream": True}, timeout=30)
        assert "request_timeout" in streamed.text.splitlines()[-4]
        deadline = time.monotonic() + 2
        while own.metric("vllm:num_requests_running"):
            assert time.monotonic() < deadline


def _model(path: Path) -> tuple[str, ...]:
    """The tiny model is too small for the native kernels."""
    return ("--model", str(path), "--backend", "reference")


def _address(server: HttpServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)
