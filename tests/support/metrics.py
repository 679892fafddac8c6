"""A server that has done a little of everything, and what it tells Prometheus."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.http_server import HttpServer, serving

Samples = dict[str, list[dict[str, str]]]
"""The labels of each sample by its name."""


@contextlib.contextmanager
def loaded_server() -> Iterator[HttpServer]:
    """A server of the default model with a lower tier, after a mixed load."""
    flags = ("--served-model-name", "smollm2", "--max-model-len", "1024", "--warmup", "1")
    more = ("--kv-cache-bytes", "128MiB", "--kv-host-bytes", "64MiB", "--max-queue", "6")
    with serving(*flags, *more) as server:
        mixed_load(server)
        yield server


def mixed_load(server: HttpServer) -> None:
    """Streams and whole answers, chats, several choices, hits, an abort and a refusal."""
    url = f"{server.url}/v1"
    story = "Once upon a time there was a small boat. " * 10
    bodies = [
        ("completions", {"prompt": story, "max_tokens": 8}),
        ("completions", {"prompt": story, "max_tokens": 8, "n": 3, "temperature": 1.0}),
        ("completions", {"prompt": [story, "The sea"], "max_tokens": 5, "ignore_eos": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("completions", {"prompt": "The sea is", "max_tokens": 12, "stream": True}),
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda b: httpx.post(f"{url}/{b[0]}", json=b[1], timeout=60), bodies)
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
    long = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=long, timeout=60) as running:
        next(running.iter_lines())
    deadline = time.monotonic() + 10
    while not server.metric("vllm:request_success_total", finished_reason="abort"):
        assert time.monotonic() < deadline, "the request runs on without its client"
    refused = httpx.post(f"{url}/completions", json={"prompt": ["a"] * 7, "max_tokens": 1})
    assert refused.status_code == 429


def samples(server: HttpServer) -> Samples:
    """The labels of each sample by its name, as the format's own parser reads them."""
    found: Samples = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found
