"""OpenVINO GenAI's pipeline with continuous batching, stepped in this process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from peers.engines.base import Arrivals, Settings

_KV_GIB = 2
_MAX_BATCHED_TOKENS = 2048


class OpenVinoEngine:
    """Option `tokenizer`: a GGUF file, where the model's own folder has no tokenizer."""

    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        threads = settings.threads or len(os.sched_getaffinity(0))
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIB
        scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = settings.sequences
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads}
        tokenizer = options.pop("tokenizer", None)
        if tokenizer is None:
            self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        else:
            self._pipeline = genai.ContinuousBatchingPipeline(
                model, genai.Tokenizer(tokenizer), scheduler, "CPU", **properties
            )
        self._requests = 0
        self._about = {
            "backend": f"openvino-genai {genai.__version__}",
            "file": Path(model).name,
            "threads": threads,
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def _add(self, prompt: list[int], tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.do_sample = False
        config.ignore_eos = True
        self._requests += 1
        ids = openvino.Tensor(np.asarray([prompt], np.int64))
        return self._pipeline.add_request(self._requests, ids, config)

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        handle = self._add(prompt, tokens)
        times: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                came = sum(len(part.generated_ids) for part in handle.read().values())
                times.extend([time.perf_counter()] * came)
        return Arrivals.of(times)

    def batch(self, prompts: list[list[int]], tokens: list[int]) -> int:
        handles = [self._add(*request) for request in zip(prompts, tokens, strict=True)]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)
