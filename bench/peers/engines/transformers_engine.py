"""transformers' own `generate`: eager PyTorch, a static batch."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import transformers

from peers.engines.base import Arrivals, Settings


class _Stamps(transformers.StoppingCriteria):
    """Notes when each token is there, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TransformersEngine:
    """No options of its own: bf16, PyTorch's attention. Requests of a batch are alike."""

    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        threads = settings.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._about = {
            "backend": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "threads": threads,
            "kv": "bf16",
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[torch.Tensor, _Stamps]:
        stamps = _Stamps()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[stamps],
            )
        return out[:, ids.shape[1] :], stamps

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        return Arrivals.of(self._generate([prompt], tokens)[1].times)

    def batch(self, prompts: list[list[int]], tokens: list[int]) -> int:
        if len(set(tokens)) > 1:
            raise SystemExit("transformers generates a static batch of equal lengths only")
        return self._generate(prompts, tokens[0])[0].numel()
