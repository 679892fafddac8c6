"""What a request's past and its parameters do to its next logits, kept incrementally."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trimaran.core.sampling_batch import Float32, Int32
from trimaran.core.sampling_params import SamplingParams


class Adjustments:
    """Sparse edits to one sequence's logits, in the arrays `SamplingBatch` wants.

    A token costs O(1) to record; a step costs a view of the arrays. Tokens of the prompt
    are subject to the repetition penalty only, those of the output to all three.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int], stop_ids: frozenset[int]
    ) -> None:
        """`stop_ids`: tokens that `min_tokens` forbids until enough were generated."""
        self._params = params
        self._slots: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._ids: Int32 = np.zeros(16, np.int32)
        self._bias: Float32 = np.zeros(16, np.float32)
        self._repetition: Float32 = np.ones(16, np.float32)
        self._penalty: Float32 = np.zeros(16, np.float32)
        # A new slot may move the arrays, so it is taken before they are named.
        for token, bias in (params.logit_bias or {}).items():
            slot = self._slot(token)
            self._bias[slot] = bias
        if params.repetition_penalty != 1.0:
            for token in set(prompt):
                slot = self._slot(token)
                self._repetition[slot] = params.repetition_penalty
        self._forbidden = stop_ids if params.min_tokens else frozenset()
        for token in self._forbidden:
            slot = self._slot(token)
            self._bias[slot] = -np.inf

    def record(self, token: int, output_length: int) -> None:
        """`token` was generated; the output has now `output_length` tokens."""
        params = self._params
        if self._forbidden and output_length >= params.min_tokens:
            for stop in self._forbidden:
                slot = self._slot(stop)
                self._bias[slot] = (params.logit_bias or {}).get(stop, 0.0)
            self._forbidden = frozenset()
        if not params.penalised:
            return
        slot = self._slot(token)
        count = self._counts[token] = self._counts.get(token, 0) + 1
        self._repetition[slot] = params.repetition_penalty
        self._penalty[slot] = params.presence_penalty + params.frequency_penalty * count

    def arrays(self) -> tuple[Int32, Float32, Float32, Float32]:
        """Views (ids, bias, repetition, penalty) of what holds for the next token."""
        size = len(self._slots)
        return (
            self._ids[:size],
            self._bias[:size],
            self._repetition[:size],
            self._penalty[:size],
        )

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token
        return slot

    def _grow(self) -> None:
        size = len(self._ids)
        self._ids = np.concatenate([self._ids, np.zeros(size, np.int32)])
        self._bias = np.concatenate([self._bias, np.zeros(size, np.float32)])
        self._repetition = np.concatenate([self._repetition, np.ones(size, np.float32)])
        self._penalty = np.concatenate([self._penalty, np.zeros(size, np.float32)])


def adjustments_for(
    params: SamplingParams, prompt: list[int], stop_ids: frozenset[int]
) -> Adjustments | None:
    """Adjustments where the parameters ask for any, else None."""
    if params.logit_bias or params.penalised or params.min_tokens:
        return Adjustments(params, prompt, stop_ids)
    return None
