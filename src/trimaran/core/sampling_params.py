"""How the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trimaran.core.errors import ParameterError, nearest

MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_N = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; names and meanings follow vLLM's.

    The processors run in this order on float32 logits: `min_tokens` mask, `logit_bias`,
    repetition, presence and frequency penalties, temperature, top-k, top-p (over what
    top-k left, renormalised), min-p (relative to the most likely token).

    Attributes:
        n: sequences to generate for the prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy (the lowest id wins a tie).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches it.
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: > 1 makes tokens of prompt and output less likely
            (positive logits are divided by it, negative ones multiplied).
        presence_penalty: subtracted once from every token already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: token id -> addend to the logit.
        seed: of the request's own random stream; without one the engine draws it.
        logprobs: log-probabilities to return for each output token: the chosen token's
            and those of this many most likely ones (0: only the chosen). They are those
            of the model (temperature 1, before any processor), as in vLLM.
        prompt_logprobs: the same for each prompt token but the first.
        stop: strings that end the sequence; not part of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end the sequence, besides the model's own.
        max_tokens: tokens to generate at most; None: as many as fit the context.
        min_tokens: no stop token can be chosen, and no stop string ends the sequence,
            before this many.
        ignore_eos: the model's own end-of-sequence tokens don't end the sequence.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ParameterError(
                    "logit_bias",
                    f"logit_bias is {self.logit_bias!r}; give a mapping of token id to bias",
                )
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.top_k == -1:  # vLLM's spelling of "all"
            object.__setattr__(self, "top_k", 0)
        self._check()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from keyword values.

        Raises:
            ParameterError: an unknown name (with the nearest known one) or a bad value.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ParameterError(
                    name, f"unknown sampling parameter '{name}'.{nearest(name, known)}"
                )
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever the caller gave."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the tokens seen so far change the distribution."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _check(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < 1e-3:
            raise ParameterError(
                "temperature",
                f"temperature is {self.temperature}; use 0 for greedy or at least 0.001",
            )
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError("top_p", "top_p is 0; it must be above 0 and at most 1")
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _real("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _real("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"{name} is {getattr(self, name)!r}; give True or False")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}",
            )
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ParameterError(
                "stop", f"{len(self.stop_strings)} stop strings; at most {MAX_STOP_STRINGS}"
            )
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ParameterError("stop", f"a stop string is {text!r}; give non-empty text")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        for token, bias in (self.logit_bias or {}).items():
            _whole("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -1e4, 1e4)


def _listed(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ParameterError(name, f"{name} is {values!r}; give a list")
    return tuple(values)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"{name} is {value!r}; give a whole number")
    if not low <= value <= high:
        raise ParameterError(name, f"{name} is {value}; give {low} to {high}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ParameterError(name, f"{name} is {value!r}; give a number")
    if not low <= value <= high:
        raise ParameterError(name, f"{name} is {value}; give {low} to {high}")
