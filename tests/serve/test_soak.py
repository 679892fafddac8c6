"""Minutes of mixed load, after which the server is as it was: `pytest -m soak`.

TRIMARAN_SOAK_SECONDS makes it longer than its three minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.hostile import Residue, connect, post, reset
from support.http_server import HttpServer, open_files, resident_bytes, serving

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("TRIMARAN_SOAK_SECONDS", "180"))
CLIENTS = 12
FLAT = 24 << 20
"""Bytes by which the last third's memory may be above the second's."""
FLAGS = ("--max-model-len", "2048", "--kv-cache-bytes", "64MiB", "--max-queue", "40")
TEXT = "the quick brown fox jumps over a lazy dog while it rains on the old stone bridge"
WORDS = TEXT.split()
FIXED = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 2}


class Load:
    """One client of many kinds; counts what it did."""

    def __init__(self, server: HttpServer, seed: int, expected: str) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._expected = expected
        self._http = httpx.Client(base_url=server.url, timeout=300)
        self.done: Counter[str] = Counter()
        self._kinds: list[Callable[[], None]] = [
            self.chat,
            self.stream,
            self.several,
            self.long,
            self.fixed,
            self.leaves,
            self.leaves_rudely,
            self.bad,
            self.others,
            self.scrape,
        ]

    def run(self, end: float) -> Counter[str]:
        with self._http:
            while time.monotonic() < end:
                kind = self._random.choice(self._kinds)
                kind()
                self.done[kind.__name__] += 1
        return self.done

    def chat(self) -> None:
        body = {"messages": [{"role": "user", "content": self._text(12)}], "max_tokens": 30}
        self._post("/v1/chat/completions", body)

    def stream(self) -> None:
        body = {"prompt": self._text(20), "max_tokens": 40, "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        if answer.status_code == 200:
            assert lines[-1] == "data: [DONE]"
            assert "error" not in json.loads(lines[-2].removeprefix("data: ")), lines[-2]
        else:
            assert answer.status_code == 429

    def several(self) -> None:
        prompts = [self._text(5) for _ in range(3)]
        found = self._post("/v1/completions", {"prompt": prompts, "n": 3, "max_tokens": 12})
        if found is not None:
            assert [choice["index"] for choice in found["choices"]] == list(range(9))

    def long(self) -> None:
        self._post("/v1/completions", {"prompt": self._text(1200), "max_tokens": 4})

    def fixed(self) -> None:
        found = self._post("/v1/completions", FIXED)
        if found is not None:
            assert json.dumps(found["choices"]) == self._expected

    def leaves(self) -> None:
        body = {"prompt": self._text(30), "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(self._random.randrange(1, 20)):
                next(lines, "")

    def leaves_rudely(self) -> None:
        body = {
            "prompt": self._text(300),
            "max_tokens": 1000,
            "stream": self._random.random() < 0.5,
        }
        request = post("/v1/completions", body)
        with contextlib.suppress(OSError), connect(self._server) as client:
            client.sendall(request[: self._random.randrange(len(request) + 1)])
            time.sleep(self._random.random() / 4)
            reset(client)

    def bad(self) -> None:
        body = self._random.choice(
            [{}, {"prompt": [{}] * 1000}, {"prompt": "a", "n": 1000}, {"prompt": "a", "x": 1}]
        )
        assert self._http.post("/v1/completions", json=body).status_code == 400

    def others(self) -> None:
        text = self._text(10)
        self._post("/v1/responses", {"input": text, "max_output_tokens": 8})
        messages = [{"role": "user", "content": text}]
        self._post("/v1/messages", {"model": "smollm2", "messages": messages, "max_tokens": 8})
        self._post("/tokenize", {"prompt": text})

    def scrape(self) -> None:
        for path in ("/metrics", "/debug/state", "/debug/blocks", "/health"):
            assert self._http.get(path).status_code == 200

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        answer = self._http.post(path, json=body)
        assert answer.status_code in (200, 429), answer.text
        found: dict[str, Any] = answer.json()
        return found if answer.status_code == 200 else None

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))


def test_the_server_is_after_minutes_as_it_was(smollm2_path: Path) -> None:
    with serving("--served-model-name", "smollm2", *FLAGS) as server:
        first = httpx.post(f"{server.url}/v1/completions", json=FIXED, timeout=60).json()
        expected = json.dumps(first["choices"])
        residue = Residue(server)
        memory: list[int] = []
        files: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.5):
                memory.append(resident_bytes(server))
                files.append(open_files(server))

        watching = threading.Thread(target=watch)
        watching.start()
        end = time.monotonic() + SECONDS
        try:
            with ThreadPoolExecutor(CLIENTS) as pool:
                running = [
                    pool.submit(Load(server, seed, expected).run, end) for seed in range(CLIENTS)
                ]
                done = sum((each.result() for each in running), Counter())
        finally:
            stop.set()
            watching.join()
        third = len(memory) // 3
        second = statistics.median(memory[third : 2 * third])
        last = statistics.median(memory[2 * third :])
        print(f"{dict(done)}; resident {second / 2**20:.1f} MiB, then {last / 2**20:.1f} MiB")
        assert min(done[kind.__name__] for kind in Load(server, 0, "")._kinds) > 0
        assert last - second <= FLAT, f"{(last - second) / 2**20:.1f} MiB more in the last third"
        assert max(files) <= residue.files + 4 * CLIENTS
        assert statistics.median(files[2 * third :]) <= statistics.median(files[third:]) + 2
        residue.assert_none(memory=512 << 20)
        assert "Traceback" not in server.log, server.log[-5000:]
        assert server.stop() == 0
