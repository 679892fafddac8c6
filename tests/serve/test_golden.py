"""The bytes of each streaming endpoint, against transcripts in `golden/`.

A client of another language reads these bytes with its own parser, so a change of them is a
change of the interface: it must be wanted. The model is tiny and random, its answers are the
same on every machine; only ids and times are replaced. To write the transcripts anew after a
change that is wanted, and to see it in the diff:

    TRIMARAN_WRITE_GOLDEN=1 python -m pytest tests/serve/test_golden.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.command_line import write_tiny_model
from support.http_server import HttpServer, serving

FOLDER = Path(__file__).parent / "golden"
CHAT = [{"role": "user", "content": "abc"}]
GREEDY: dict[str, Any] = {"stream": True, "temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_completion_tokens": 6, "ignore_eos": True},
    ),
    "chat-usage-logprobs": (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "max_tokens": 3,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "completions": ("/v1/completions", {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}),
    "completions-echo-logprobs": (
        "/v1/completions",
        {
            "prompt": "abc",
            "max_tokens": 3,
            "ignore_eos": True,
            "echo": True,
            "logprobs": 1,
            "stream_options": {"include_usage": True},
        },
    ),
    "completions-too-long": ("/v1/completions", {"prompt": "abc" * 100, "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": "abc", "max_output_tokens": 6}),
    "messages": ("/v1/messages", {"model": "tiny", "messages": CHAT, "max_tokens": 6}),
    "messages-stop": (
        "/v1/messages",
        {"model": "tiny", "messages": CHAT, "max_tokens": 20, "stop_sequences": ["e"]},
    ),
}
MERGED = 30
"""Tries: a server that is late puts the tokens of two steps into one event, which is right but
isn't what was written down."""


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    flags = ("--model", str(model), "--backend", "reference", "--no-prefix-cache")
    with serving(*flags, "--warmup", "0") as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_the_bytes_of_a_stream_are_the_transcript(tiny_server: HttpServer, name: str) -> None:
    file = FOLDER / f"{name}.txt"
    if os.environ.get("TRIMARAN_WRITE_GOLDEN"):
        # The one with the most events is one in which none was merged.
        found = max((transcript(tiny_server, name) for _ in range(10)), key=lambda t: t.count("\n"))
        file.write_text(found)
    golden = file.read_text()
    for _ in range(MERGED):
        found = transcript(tiny_server, name)
        if found == golden:
            return
    assert found == golden


def test_every_transcript_belongs_to_a_request() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == REQUESTS.keys()


def transcript(server: HttpServer, name: str) -> str:
    """Status, type and body of an answer, without what differs from one to the next."""
    path, body = REQUESTS[name]
    answer = httpx.post(f"{server.url}{path}", json=GREEDY | body, timeout=60)
    text = f"{answer.status_code} {answer.headers['content-type']}\n\n{answer.text}"
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    text = re.sub(r'"created(_at)?":\d+', r'"created\1":0', text)
    # The last digits of a sum in float32 are the machine's.
    return re.sub(r"-?\d+\.\d{4,}", lambda found: f"{float(found[0]):.3f}", text)
