"""One engine in a process of its own, told what to run over stdin, answering on stdout.

Each line in is a JSON object with a "task"; each line out is its result.

    {"task": "describe"}                                    -> what it is, bytes of weights
    {"task": "tokenize", "text": ...}                       -> {"ids": [...]}
    {"task": "stream", "prompt": [ids], "tokens": n}        -> {"ttft": s, "tpot": s}
    {"task": "batch", "prompts": [[ids], ...], "tokens": n} -> {"seconds": s, "tokens": n}

Started by `peers.py`. Both engines are timed by the same code, where a caller gets the
tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

LLAMA_CPP_SLOT_TOKENS = 1280


class Arrivals(NamedTuple):
    """When the first and the last token reached the caller, and how many there were."""

    first: float
    last: float
    tokens: int


class Engine(Protocol):
    """What both engines can do. Greedy, no stop at the end of sequence, nothing cached."""

    def describe(self) -> dict[str, Any]: ...

    def tokenize(self, text: str) -> list[int]: ...

    def stream(self, prompt: list[int], tokens: int) -> Arrivals: ...

    def batch(self, prompts: list[list[int]], tokens: int) -> int:
        """Runs all prompts at once; how many tokens came out."""
        ...


class Trimaran:
    """This project, through `LLM`."""

    def __init__(self, model: str, sequences: int, options: dict[str, Any]) -> None:
        from trimaran import LLM

        self._llm = LLM(model, max_num_seqs=sequences, prefix_cache=False, **options)

    def describe(self) -> dict[str, Any]:
        return self._llm.describe()

    def tokenize(self, text: str) -> list[int]:
        return list(self._llm.tokenizer.encode(text))

    def _params(self, tokens: int) -> Any:
        from trimaran import SamplingParams

        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        times: list[float] = []
        for delta in self._llm.stream(prompt, self._params(tokens)):
            times.extend([time.perf_counter()] * len(delta.token_ids))
        return Arrivals(times[0], times[-1], len(times))

    def batch(self, prompts: list[list[int]], tokens: int) -> int:
        outputs = self._llm.generate(prompts, self._params(tokens))
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class LlamaCpp:
    """llama.cpp's server, called within the process, without HTTP."""

    def __init__(self, model: str, sequences: int, options: dict[str, Any]) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = sequences
        params.n_ctx = sequences * LLAMA_CPP_SLOT_TOKENS
        threads = options.pop("threads", 0) or len(os.sched_getaffinity(0))
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        flash = {"off": "DISABLED", "auto": "AUTO"}[options.pop("flash_attention", "off")]
        params.flash_attn_type = getattr(
            xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}"
        )
        params.cache_ram_mib = 0
        params.n_ctx_checkpoints = 0
        params.fit_params = False
        params.verbosity = -1
        if options:
            raise SystemExit(f"llama.cpp has no options {sorted(options)}")
        self._server = xllamacpp.Server(params)
        self._about = {
            "backend": f"llama.cpp (xllamacpp {xllamacpp.__version__})",
            "file": Path(model).name,
            "weight_bytes": Path(model).stat().st_size,
            "threads": threads,
            "flash_attention": flash.lower(),
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def tokenize(self, text: str) -> list[int]:
        raise SystemExit("prompts are tokenized by the other engine")

    def _request(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        times: list[float] = []
        counts: list[int] = []

        def receive(chunk: dict[str, Any]) -> None:
            if "usage" in chunk:  # the last one brings no token
                counts.append(chunk["usage"]["completion_tokens"])
            else:
                times.append(time.perf_counter())

        request = self._request(prompt, tokens) | {"stream": True}
        self._server.handle_completions(request, receive)
        return Arrivals(times[0], times[-1], counts[0])

    def batch(self, prompts: list[list[int]], tokens: int) -> int:
        counts: list[int] = []

        def ask(prompt: list[int]) -> None:
            answer = self._server.handle_completions(self._request(prompt, tokens))
            counts.append(answer["usage"]["completion_tokens"])

        callers = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        return sum(counts)


ENGINES = {"trimaran": Trimaran, "llama.cpp": LlamaCpp}


def perform(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    """The result of one task."""
    task = order["task"]
    if task == "describe":
        return engine.describe()
    if task == "tokenize":
        return {"ids": engine.tokenize(order["text"])}
    tokens = order["tokens"]
    start = time.perf_counter()
    if task == "stream":
        arrivals = engine.stream(order["prompt"], tokens)
        _expect(arrivals.tokens, tokens)
        pause = (arrivals.last - arrivals.first) / max(1, tokens - 1)
        return {"ttft": arrivals.first - start, "tpot": pause}
    if task == "batch":
        count = engine.batch(order["prompts"], tokens)
        seconds = time.perf_counter() - start
        _expect(count, tokens * len(order["prompts"]))
        return {"seconds": seconds, "tokens": count}
    raise SystemExit(f"unknown task '{task}'")


def _expect(count: int, wanted: int) -> None:
    if count != wanted:
        raise SystemExit(f"{count} tokens came out, {wanted} were asked for")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object")
    args = parser.parse_args()
    # What a library prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    engine = ENGINES[args.engine](args.model, args.sequences, args.options)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers)
    for line in sys.stdin:
        print(json.dumps(perform(engine, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
