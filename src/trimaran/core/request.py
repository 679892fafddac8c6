"""A request, the sequences that answer it, and the ways each can end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimaran.core.namespace import Namespace
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import STANDARD, SloClass


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are those of the OpenAI and vLLM APIs."""

    STOP = "stop"  # a stop token, a stop string, or the model's end of sequence
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # the request failed; the others go on


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # holds no blocks; also after preemption
    LOADING = enum.auto()  # waits for blocks from a lower tier, holding none itself
    RUNNING = enum.auto()  # holds blocks and is in every step that has budget
    PARKED = enum.auto()  # holds nothing and waits for more of its prompt, in no queue
    FINISHED = enum.auto()  # ended; holds nothing


@dataclass(slots=True, eq=False)
class Request:
    """What a caller asked for.

    Attributes:
        id: unique among the requests that are not finished.
        prompt: token ids, at least one once it is complete.
        params: how to sample, when to stop.
        arrival: seconds on the engine's clock.
        priority: smaller is served first under the `priority` order.
        cache_salt: prefixes are shared only between requests of equal salt.
        slo: what its class expects of its latency.
        adapter: name of the weights laid over the model's; prefixes are shared within one.
        retention: how long the prompt is to stay in the cache afterwards; None is as most.
        pooling: instead of an answer one vector of the prompt is wanted, made in this way (see
            `POOLINGS`); None: an answer.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    slo: SloClass = STANDARD
    adapter: str = ""
    retention: Retention | None = None
    pooling: str | None = None

    @property
    def namespace(self) -> Namespace:
        """Within which its prefixes are shared."""
        return Namespace(self.cache_salt, self.adapter)


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens: a request has `params.n` of them once its prompt is computed.

    The invariants: `computed <= total`; KV of `tokens[:computed]` lies in the sequence's
    blocks; a sequence samples in the step after which `computed == total` would hold.

    Attributes:
        request: whose answer this is.
        index: 0 .. n - 1 among the request's sequences.
        tokens: prompt, then output.
        computed: tokens whose KV is in the cache.
        cached: how many of the prompt's tokens the prefix index supplied at first admission.
        preemptions: how often its blocks were taken back.
        seed: of its random stream.
        open: its prompt still arrives: known tokens may be computed, none is sampled.
    """

    request: Request
    index: int
    tokens: list[int]
    seed: int = 0
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    forked: bool = field(default=False)
    open: bool = field(default=False)

    @property
    def id(self) -> str:
        """Unique: the request's id, and the index when it isn't the first."""
        return self.request.id if self.index == 0 else f"{self.request.id}#{self.index}"

    @property
    def total(self) -> int:
        """Tokens known, computed or not."""
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """Generated tokens so far (a copy)."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do until more of its prompt arrives."""
        parked = self.status is SequenceStatus.PARKED
        return self.open and (parked or self.computed == len(self.tokens))

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
