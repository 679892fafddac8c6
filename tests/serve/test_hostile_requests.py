"""Bytes that aren't what a sound client sends: each gets an error or a closed connection, none
hurts the next request, and none is understood as something else than what was sent."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from support.command_line import write_tiny_model
from support.hostile import LONG, Residue, connect, everything, exchange, post, reset, state, until
from support.http_server import HttpServer, serving

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
_REFUSALS = tuple(b"HTTP/1.1 %d" % status for status in (400, 404, 405, 505))
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    keys = {"llama.context_length": 4096}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), **keys)
    flags = ("--model", str(model), "--backend", "reference", "--warmup", "1")
    with serving(*flags, "--header-timeout", "2", "--body-timeout", "2") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(server: HttpServer) -> Iterator[None]:
    residue = Residue(server)
    yield
    residue.assert_none(memory=128 << 20)
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=BODY, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"content-length: -5\r\n",
        b"content-length: +5\r\n",
        b"content-length: 0x5\r\n",
        b"content-length: 5 5\r\n",
        b"content-length: 99999999999999999999999999\r\n",
        b"content-length : 5\r\n",
        b" folded: 5\r\n",
        b"a: b\x00c\r\n",
        b"a\x00b: c\r\n",
        b"no colon\r\n",
        b": no name\r\n",
    ],
)
def test_a_request_that_two_readers_could_split_apart_is_refused(
    server: HttpServer, head: bytes
) -> None:
    smuggled = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    start = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
    answer = exchange(server, start + head + b"\r\n0\r\n\r\n" + smuggled)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n{}\r\n0\r\n\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"fffffffffffffffff\r\n{}", b"-1\r\n{}"],
)
def test_chunks_that_are_none(server: HttpServer, chunks: bytes) -> None:
    start = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = exchange(server, start + chunks)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "line",
    [
        b"BREW /v1/models HTTP/1.1",
        b"CONNECT example.org:443 HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"GET http://[::1 HTTP/1.1",
        b"GET /\x80\xff HTTP/1.1",
        b"GET / HTTP/9.9",
        b"GET / JUNK",
        b"GET /v1/models HTTP/0.9",
        b"PRI * HTTP/2.0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_request_lines_that_are_none(server: HttpServer, line: bytes) -> None:
    answer = exchange(server, line + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer == b"" or answer.startswith(_REFUSALS)
    assert b"Traceback" not in answer


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "HEAD", "PROPFIND"])
def test_methods_that_nothing_takes(server: HttpServer, method: str) -> None:
    answer = httpx.request(method, f"{server.url}{COMPLETIONS}", timeout=10)
    assert answer.status_code == 405
    if method != "HEAD":
        assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../../../etc/passwd",
        "/ui/..%2f..%2f..%2fetc%2fpasswd",
        "/ui/%2e%2e/__init__.py",
        "/ui/%2e%2e%2f__init__.py",
        "/ui/..\\..\\service.py",
        "/ui/%00index.html",
        "/ui/index.html%00.js",
        "/ui//etc/passwd",
        "/ui/__init__.py",
        "//ui/index.html",
        "/ui/%252e%252e%252fservice.py",
        "/ui/%c0%ae%c0%ae/service.py",
        "/ui/",
        "/ui",
        "/" + "a" * 60_000,
    ],
)
def test_paths_lead_nowhere_else(server: HttpServer, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = exchange(server, request.encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer[:200]
    assert b"root:" not in answer and b"import" not in answer


def test_a_path_forges_no_log_line(server: HttpServer) -> None:
    exchange(server, b"GET /%0aFORGED%0d%1b[31m HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    until("the request is logged", lambda: "FORGED" in server.log)
    (line,) = [line for line in server.log.splitlines() if "FORGED" in line]
    assert "GET /%0aFORGED" in line and "\x1b" not in line


def test_http_1_0_gets_no_chunks(server: HttpServer) -> None:
    request = post(COMPLETIONS, BODY | {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = exchange(server, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    answer = exchange(server, b"GET /version HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}")


def test_pipelined_requests_are_answered_in_their_order(server: HttpServer) -> None:
    body = post(COMPLETIONS, BODY | {"stream": True})
    close = GET + b"connection: close\r\n\r\n"
    answer = exchange(server, body + GET + b"\r\n" + post(COMPLETIONS, BODY) + close)
    parts = answer.split(b"HTTP/1.1 200")[1:]
    assert len(parts) == 4
    assert b"data: [DONE]" in parts[0] and b'"version"' in parts[1]
    assert b'"usage"' in parts[2] and b'"version"' in parts[3]


def test_garbage_behind_a_stream_is_never_answered_within_it(server: HttpServer) -> None:
    for behind in (b"GE", GET, b"\x00nonsense\r\n\r\n", GET + b"a: " + b"b" * 100_000):
        with connect(server) as client:
            client.sendall(post(COMPLETIONS, LONG | {"stream": True}))
            client.recv(1)
            client.sendall(behind)
            deadline = time.monotonic() + 3  # header_timeout is 2 s
            found = b""
            while time.monotonic() < deadline and (part := client.recv(1 << 16)):
                found += part
            stream, _, _ = found.partition(b"data: [DONE]")  # what comes after it may be refused
            assert b"HTTP/1.1 4" not in stream
            reset(client)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_behind_pipelined_requests_is_noticed(
    server: HttpServer, stream: bool
) -> None:
    with connect(server) as client:
        client.sendall(post(COMPLETIONS, LONG | {"stream": stream}) * 3)
        until("it runs", lambda: state(server)["running"] == 1)
    begin = time.monotonic()
    until("it has ended", lambda: state(server)["server"]["active_requests"] == 0)
    assert time.monotonic() - begin < 5


def test_a_connection_has_a_limit_of_requests_that_wait(server: HttpServer) -> None:
    with connect(server) as client:
        client.sendall(post(COMPLETIONS, LONG | {"stream": True}))
        client.recv(1)
        found = b"x"
        with contextlib.suppress(ConnectionError):
            client.sendall((GET + b"\r\n") * 100)
            while found:
                found = client.recv(1 << 16)


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "cache_salt": "\\udfff"}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": "a", "request_id": "\\u0000"}',
        b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
        b'{"prompt": "a", "logit_bias": {"1": Infinity}}',
        b'{"prompt": "a", "logit_bias": {"1": 1e999}}',
        b'{"prompt": "a", "seed": 99999999999999999999999}',
        b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
def test_texts_that_are_none(server: HttpServer, content: bytes) -> None:
    answer = httpx.post(
        f"{server.url}{COMPLETIONS}",
        content=content,
        headers={"content-type": "application/json"},
        timeout=30,
    )
    assert answer.status_code in (400, 404), answer.text[:200]
    assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role": "user", "content": "\\ud800"}]',
        b'[{"role": "user", "content": "a", "name": "\\ud800"}]',
        b'[{"role": "\\ud800", "content": "a"}]',
        b'[{"role": "user", "content": {"a": 1}}]',
        b'[{"role": "user", "content": [[["a"]]]}]',
    ],
)
def test_conversations_that_are_none(server: HttpServer, messages: bytes) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=b'{"max_tokens": 1, "chat_template_kwargs": {"x": "\\udc00"}, "messages": %s}'
        % messages,
        headers={"content-type": "application/json"},
        timeout=30,
    )
    # A further field is the template's own matter: what it doesn't read does no harm.
    assert answer.status_code in (200, 400), answer.text[:200]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (COMPLETIONS, b'{"prompt": [' + b"{}," * 1_000_000 + b"{}]}"),
        (COMPLETIONS, b'{"prompt": "a", "stop": [' + b"1," * 1_000_000 + b"1]}"),
        (
            COMPLETIONS,
            b'{"prompt": "a", "logit_bias": {'
            + b",".join(b'"%d":"x"' % i for i in range(400_000))
            + b"}}",
        ),
        (
            COMPLETIONS,
            b'{"prompt": "a",' + b",".join(b'"x%d":1' % i for i in range(400_000)) + b"}",
        ),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [' + b"{}," * 1_000_000 + b"{}]}]}",
        ),
        ("/v1/messages", b'{"model": "tiny", "messages": [' + b"{}," * 1_000_000 + b"{}]}"),
        ("/v1/responses", b'{"input": [' + b"{}," * 1_000_000 + b"{}]}"),
        ("/detokenize", b'{"tokens": [' + b'"a",' * 1_000_000 + b"1]}"),
    ],
)
def test_a_million_mistakes_cost_as_much_as_one(
    server: HttpServer, path: str, content: bytes
) -> None:
    begin = time.monotonic()
    answer = httpx.post(f"{server.url}{path}", content=content, timeout=60)
    assert answer.status_code == 400
    assert len(answer.content) < 10_000
    assert time.monotonic() - begin < 15  # it was a minute and more, and gigabytes


@pytest.mark.parametrize("to", ["websocket", "h2c", "nonsense"])
def test_upgrades_to_what_isnt_there(server: HttpServer, to: str) -> None:
    lines = [
        "GET /nothing HTTP/1.1",
        "host: x",
        f"upgrade: {to}",
        "connection: upgrade",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    ]
    answer = exchange(server, "\r\n".join(lines).encode() + b"\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 404")), answer
    assert "Traceback" not in server.log


def test_a_large_body_without_a_length_is_cut_off(server: HttpServer) -> None:
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    start = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = exchange(server, start, *[chunk] * 64)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")


def test_a_length_that_never_comes(server: HttpServer) -> None:
    start = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n{"
    answer = exchange(server, start % (1 << 40))
    assert answer.startswith(b"HTTP/1.1 413")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert error["type"] == "error" and error["error"]["type"] == "request_too_large"
    assert exchange(server, start % 1000).startswith(b"HTTP/1.1 408")


def test_two_requests_of_one_name_are_two(server: HttpServer) -> None:
    """A request that takes another's name neither fails nor ends it."""
    named = LONG | {"max_tokens": 2000, "request_id": "mine"}
    alone = httpx.post(f"{server.url}{COMPLETIONS}", json=named, timeout=60).json()
    with connect(server) as client:
        client.sendall(post(COMPLETIONS, named, "connection: close"))
        until("it runs", lambda: state(server)["running"] == 1)
        with connect(server) as thief:
            thief.sendall(post(COMPLETIONS, named | {"prompt": "gh"}))
            until("both run", lambda: state(server)["running"] == 2)
        found = json.loads(everything(client).partition(b"\r\n\r\n")[2])
    assert found["choices"] == alone["choices"]
    assert found["id"] == "cmpl-mine"
