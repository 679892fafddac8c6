"""llama.cpp's server, called within the process, without HTTP."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import xllamacpp

from peers.engines.base import Arrivals, Settings


class LlamaCppEngine:
    """Options: flash_attention=off|auto (off by default: its batched decode is faster so)."""

    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = settings.sequences
        params.n_ctx = settings.sequences * settings.context
        threads = settings.threads or len(os.sched_getaffinity(0))
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        flash = {"off": "DISABLED", "auto": "AUTO"}[options.pop("flash_attention", "off")]
        params.flash_attn_type = getattr(
            xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}"
        )
        params.cache_ram_mib = 0
        params.n_ctx_checkpoints = 0
        params.fit_params = False
        params.verbosity = -1
        self._server = xllamacpp.Server(params)
        self._about = {
            "backend": f"llama.cpp (xllamacpp {xllamacpp.__version__})",
            "file": Path(model).name,
            "weight_bytes": Path(model).stat().st_size,
            "threads": threads,
            "flash_attention": flash.lower(),
            "kv": "f16",
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def _request(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
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

    def batch(self, prompts: list[list[int]], tokens: list[int]) -> int:
        counts: list[int] = []

        def ask(prompt: list[int], limit: int) -> None:
            answer = self._server.handle_completions(self._request(prompt, limit))
            counts.append(answer["usage"]["completion_tokens"])

        callers = [
            threading.Thread(target=ask, args=pair) for pair in zip(prompts, tokens, strict=True)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        return sum(counts)
