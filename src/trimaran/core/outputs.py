"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimaran.core.request import FinishReason

if TYPE_CHECKING:  # so that whoever only names an option needs no numpy
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model (natural, temperature 1).

    Attributes:
        rank: 1 is the most likely token.
        text: the token by itself; bytes that aren't whole characters become U+FFFD.
    """

    logprob: float
    rank: int
    text: str


Logprobs = dict[int, Logprob]
"""Token id -> its log-probability: the chosen token first, then the most likely ones."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, seconds on the engine's clock; None until they happen.

    Attributes:
        prompt_complete: of a request that was opened: when the last of its prompt came.
        output_tokens: tokens of all its sequences so far.
        decode_seconds: from the first to the last token so far, added up over its sequences.
        gaps: between tokens of one sequence, likewise.
        itl: the longest such gap in seconds, 0 before there is one.
        cost: what the request counts in the objective, by its SLO class; once it was answered.
    """

    arrival: float
    prompt_complete: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    decode_seconds: float = 0.0
    gaps: int = 0
    itl: float = 0.0
    cost: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from the arrival, or from when the prompt was complete, to the first token."""
        if self.first_token is None:
            return None
        return self.first_token - (self.prompt_complete or self.arrival)

    @property
    def tpot(self) -> float:
        """Mean seconds between two tokens of a sequence; 0 where none had two."""
        return self.decode_seconds / self.gaps if self.gaps else 0.0


@dataclass(slots=True)
class SequenceDelta:
    """What one step added to one sequence.

    Attributes:
        text: characters that are now certain; once emitted they never change.
        token_ids: tokens of this step; a stop token is among them, its text isn't.
        logprobs: one entry a token of `token_ids`, when asked for.
        prompt_logprobs: for all prompt tokens, with the first delta of index 0, when asked.
        finish_reason: set with the last delta.
        stop_reason: the stop string or stop token id that ended the sequence; None for the
            model's own end of sequence.
        error: why the request failed, with finish reason ERROR.
        vector: [width] of the prompt, with the only delta of a request that was to be pooled.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    vector: Vector | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` sequences; fields as in vLLM."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's whole answer; fields as in vLLM.

    Attributes:
        vector: [width] of the prompt, not normalised, where the request was to be pooled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    vector: Vector | None = None

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.outputs[0].text

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self.metrics.cached_tokens if self.metrics else 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector, float32 [width]."""

    embedding: Vector


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What `embed` gives for a prompt; fields as in vLLM."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None
    finished: bool = True
