"""Clients that are slow, silent, many, or gone: what they leave behind, and what the others
notice of them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from support.command_line import write_tiny_model
from support.hostile import LONG, Residue, connect, everything, post, reset, state, until
from support.http_server import HttpServer, resident_bytes, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "abc", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
SURVIVOR = {"prompt": "abcdefgh", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
KILLED = """
import socket, sys, time
host, port, count, content = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
clients = [socket.create_connection((host, port)) for _ in range(count)]
for client in clients:
    client.sendall(content)
for client in clients:
    client.recv(1)
print("streaming", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    keys = {"llama.context_length": 8192}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), **keys)
    flags = ("--model", str(model), "--backend", "reference", "--warmup", "1")
    limits = ("--header-timeout", "3", "--body-timeout", "3", "--write-timeout", "3")
    with serving(*flags, *limits, "--keep-alive", "3", "--kv-cache-bytes", "256MiB") as running:
        httpx.post(f"{running.url}{COMPLETIONS}", json=SURVIVOR, timeout=60)
        yield running


@pytest.fixture
def residue(server: HttpServer) -> Residue:
    until("the test before has ended", lambda: state(server)["server"]["active_requests"] == 0)
    return Residue(server)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closed", "reset"])
def test_who_leaves_leaves_nothing(
    server: HttpServer, residue: Residue, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    """A disconnect at every stage of a request, a hundred times in all."""
    request = post(CHAT, _chat(stream, 3000))
    short = post(CHAT, _chat(stream, 3))
    head = request.index(b"\r\n\r\n") + 4
    for _ in range(5):
        for cut in (0, 1, 20, head - 2, head, head + 10, len(request) - 1):
            with connect(server) as client:
                client.sendall(request[:cut])
                leave(client)
        for wait in (0.0, 0.002, 0.01, 0.05):  # at the tokenizer, in the queue, in prefill...
            with connect(server) as client:
                client.sendall(request)
                time.sleep(wait)
                leave(client)
        with connect(server) as client:  # within the stream
            client.sendall(request)
            if stream:
                client.recv(1 << 10)
            leave(client)
        for wait in (0.005, 0.01, 0.02, 0.04):  # about at the end
            with connect(server) as client:
                client.sendall(short)
                time.sleep(wait)
                leave(client)
    residue.assert_none()


def test_who_leaves_the_queue_leaves_nothing(server: HttpServer, residue: Residue) -> None:
    """More than run at once: some leave while they wait, and the others still come to run."""
    seats = state(server)["server"]["max_num_seqs"]
    request = post(COMPLETIONS, LONG | {"n": 64, "stream": True})
    clients = [connect(server) for _ in range(seats // 64 + 3)]
    for client in clients:
        client.sendall(request)
    until("some wait", lambda: state(server)["waiting"] > 0, 60)
    for client in clients[-2:] + clients[:-2]:
        client.close()
    residue.assert_none(memory=256 << 20)


def test_who_never_reads_is_cut_off(server: HttpServer, residue: Residue) -> None:
    """Its stream is far larger than what the system takes in for it, as are all of a dozen;
    the memory doesn't grow with them, and another's answer is the same meanwhile."""
    alone = _text(server, SURVIVOR)
    heavy = LONG | {"logprobs": 12, "n": 8, "max_tokens": 2000, "stream": True}
    clients = [connect(server, receive_buffer=4096) for _ in range(3)]
    for client in clients:
        client.sendall(post(COMPLETIONS, heavy))
    until("they run", lambda: state(server)["running"] >= 8, 60)
    assert _text(server, SURVIVOR) == alone
    begin = time.monotonic()
    until("they are cut off", lambda: state(server)["server"]["active_requests"] == 0, 60)
    assert state(server)["running"] == 0, f"after {time.monotonic() - begin} s"
    residue.assert_none(memory=256 << 20)  # with its clients still there
    for client in clients:
        client.close()


def test_who_never_reads_a_whole_answer_is_cut_off(server: HttpServer, residue: Residue) -> None:
    """Also where all of it was handed over to the connection at once, and where the client
    has asked for the connection to be closed."""
    large = {"prompt": "cdefgh" * 170_000, "return_token_strs": True}  # an answer of 6 MB
    for headers in ((), ("connection: close",)):
        before = server.log.count("POST /tokenize 200")
        clients = [connect(server, receive_buffer=4096) for _ in range(2)]
        for client in clients:
            client.sendall(post("/tokenize", large, *headers))
        until("both are answered", partial(_answered, server, before + 2), 60)
        residue.assert_none(memory=256 << 20)
        for client in clients:
            client.close()


def test_who_reads_slowly_but_steadily_gets_everything(
    server: HttpServer, residue: Residue
) -> None:
    body = LONG | {"logprobs": 12, "n": 4, "max_tokens": 500, "stream": True, "prompt": "abcd"}
    with connect(server, receive_buffer=4096) as client:
        client.sendall(post(COMPLETIONS, body, "connection: close"))
        found = bytearray()
        begin = time.monotonic()
        while part := client.recv(1 << 13):
            found += part
            if time.monotonic() - begin < 5:  # beyond write_timeout; then hurry up
                time.sleep(0.2)
    assert b"data: [DONE]" in found[-100:]
    assert found.count(b'"finish_reason":"length"') == 4
    residue.assert_none(memory=256 << 20)


def test_half_open_connections_end(server: HttpServer, residue: Residue) -> None:
    """Silent ones: before, within and after a request. All end by the server's own clock."""
    request = post(COMPLETIONS, SHORT)
    clients = [connect(server) for _ in range(40)]
    for i, client in enumerate(clients):
        client.sendall([b"", b"POST /v1", request[:-3], request][i % 4])
    residue.assert_none()  # while all are open at their end
    ends = [everything(client) for client in clients]
    assert all(end.startswith(b"HTTP/1.1 408") for end in ends[0::4] + ends[1::4] + ends[2::4])
    assert all(end.startswith(b"HTTP/1.1 200") for end in ends[3::4])


def test_slow_writers_dont_get_more_time_by_dripping(server: HttpServer, residue: Residue) -> None:
    request = post(COMPLETIONS, SHORT)
    begin = time.monotonic()
    with connect(server) as head, connect(server) as body:
        body.sendall(request[: request.index(b"{")])
        with contextlib.suppress(ConnectionError):
            for i in range(100):
                head.sendall(request[i : i + 1])
                body.sendall(b" ")
                time.sleep(0.1)
    assert time.monotonic() - begin < 8
    residue.assert_none()


def test_500_connections_hurt_nobody(server: HttpServer, residue: Residue) -> None:
    """Half of them silent, half asking for one thing after the other."""
    alone = _text(server, SURVIVOR)
    quiet = _latencies(server)
    clients = [connect(server) for _ in range(500)]
    stop = threading.Event()

    def bother(own: list[socket.socket]) -> None:
        while not stop.is_set():
            for client in own:
                with contextlib.suppress(OSError):
                    client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                    client.recv(1 << 12)
                stop.wait(0.01)

    with ThreadPoolExecutor(2) as pool:
        for i in (0, 1):
            pool.submit(bother, clients[i * 125 : (i + 1) * 125])
        busy = _latencies(server)
        text = _text(server, SURVIVOR)
        stop.set()
    for client in clients:
        client.close()
    assert text == alone
    assert busy <= 4 * quiet + 0.5, f"p99 {busy:.3f} s beside 500 connections, {quiet:.3f} s alone"
    residue.assert_none()


def test_bad_requests_hurt_nobody(server: HttpServer, residue: Residue) -> None:
    """A flood of what is refused: heads without end, bodies that are none, unknown fields."""
    quiet = _latencies(server)
    alone = _text(server, SURVIVOR)
    flood = [
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300,
        b"GET / HTTP/1.1\r\na: " + b"b" * 100_000,
        post(COMPLETIONS, b"{" * 10_000),
        post(COMPLETIONS, {"prompt": [{}] * 10_000}),
        post(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}),
        post("/nothing", b"\xff" * 1000),
        b"\x00" * 1000,
    ]
    stop = threading.Event()

    def bother(offset: int) -> None:
        while not stop.is_set():
            for content in flood[offset::2]:
                with contextlib.suppress(OSError), connect(server) as client:
                    client.sendall(content)
                    client.recv(1 << 12)
                stop.wait(0.01)

    with ThreadPoolExecutor(2) as pool:
        for offset in (0, 1):
            pool.submit(bother, offset)
        busy = _latencies(server)
        text = _text(server, SURVIVOR)
        stop.set()
    assert text == alone
    assert busy <= 4 * quiet + 0.5, f"p99 {busy:.3f} s beside the flood, {quiet:.3f} s alone"
    residue.assert_none()


def test_200_streams_whose_process_is_killed_leave_nothing(
    server: HttpServer, residue: Residue
) -> None:
    alone = _text(server, SURVIVOR)
    quiet = _latencies(server)
    host, port = server.url.removeprefix("http://").split(":")
    content = post(COMPLETIONS, LONG | {"max_tokens": 8000, "stream": True}).decode()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, host, port, "200", content], stdout=subprocess.PIPE
    ) as clients:
        assert clients.stdout is not None
        assert clients.stdout.readline() == b"streaming\n"
        assert state(server)["server"]["active_requests"] == 200
        with ThreadPoolExecutor(1) as pool:
            survivor = pool.submit(_text, server, SURVIVOR)
            until("it runs too", lambda: state(server)["server"]["active_requests"] == 201)
            clients.kill()
            killed = time.monotonic()
            until("they are gone", lambda: state(server)["server"]["active_requests"] <= 1)
            assert time.monotonic() - killed < 5
            assert survivor.result(60) == alone
    busy = _latencies(server)
    assert busy <= 4 * quiet + 0.5, f"p99 {busy:.3f} s afterwards, {quiet:.3f} s before"
    residue.assert_none(memory=256 << 20)


def test_what_is_beyond_max_connections_is_told_so(server: HttpServer, tmp_path: object) -> None:
    with serving(
        *("--model", str(_model_of(server)), "--backend", "reference", "--warmup", "0"),
        *("--max-connections", "20"),
    ) as small:
        clients = [connect(small) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1 << 12).startswith(b"HTTP/1.1 200")
        with connect(small) as refused:
            answer = everything(refused)
            assert answer.startswith(b"HTTP/1.1 503")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many"
        clients[0].close()
        with connect(small) as taken:
            taken.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert taken.recv(1 << 12).startswith(b"HTTP/1.1 200")
        # Connections that wait for a request don't keep the server from ending.
        begin = time.monotonic()
        assert small.stop() == 0
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("missing", [1, 0], ids=["without their last byte", "whole"])
def test_bodies_are_bounded_together(server: HttpServer, missing: int) -> None:
    """300 clients with a body of the largest size, and a tokenizer that is slower than they:
    the memory they take has a bound, and others don't wait for all of them.
    """
    size = 1 << 20
    content = b'{"prompt":"' + b"cdefgh" * ((size - 20) // 6) + b'"}'
    content += b" " * (size - len(content))
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % size + content[: size - missing]
    with serving(
        *("--model", str(_model_of(server)), "--backend", "reference", "--warmup", "0"),
        *("--max-body-bytes", str(size), "--body-timeout", "5"),
    ) as small:
        residue = Residue(small)
        clients = [connect(small) for _ in range(300)]
        slowest = highest = 0.0
        with ThreadPoolExecutor(20) as pool, httpx.Client(base_url=small.url, timeout=60) as other:
            sending = [pool.submit(_send, client, request) for client in clients]
            end = time.monotonic() + 2
            while time.monotonic() < end or not all(each.done() for each in sending):
                begin = time.monotonic()
                assert other.get("/version").status_code == 200
                slowest = max(slowest, time.monotonic() - begin)
                highest = max(highest, resident_bytes(small) - residue.memory)
                time.sleep(0.02)
        for client in clients:
            reset(client)
        # A body that is whole becomes an answer of five times its size, which nobody reads.
        bound = (200 if missing else 800) << 20
        assert highest < bound, f"{highest / (1 << 20):.0f} MiB"
        assert slowest < 5, f"another client waited {slowest:.1f} s"
        residue.assert_none(memory=bound)


def _send(client: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(content)


def _answered(server: HttpServer, count: int) -> bool:
    return server.log.count("POST /tokenize 200") >= count


def _chat(stream: bool, tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": "abcdefgh" * 20}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": stream}


def _text(server: HttpServer, body: dict[str, object]) -> str:
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body | {"logprobs": 1}, timeout=120)
    assert answer.status_code == 200
    return json.dumps(answer.json()["choices"])


def _latencies(server: HttpServer) -> float:
    """The slowest of 60 short requests, one after the other on one connection, in seconds."""
    found = []
    with httpx.Client(timeout=60) as client:
        for _ in range(60):
            begin = time.perf_counter()
            assert client.post(f"{server.url}{COMPLETIONS}", json=SHORT).status_code == 200
            found.append(time.perf_counter() - begin)
    return sorted(found)[-1]


def _model_of(server: HttpServer) -> str:
    command = server.process.args
    assert isinstance(command, list)
    return str(command[command.index("--model") + 1])
