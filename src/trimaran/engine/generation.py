"""The engine's own record of a request while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.core.outputs import Logprobs, RequestMetrics
from trimaran.core.request import FinishReason, Request, Sequence
from trimaran.core.uniforms import derive_seed
from trimaran.engine.adjustments import Adjustments, adjustments_for
from trimaran.engine.text import TextStream
from trimaran.models.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence with what turns its tokens into an answer.

    Attributes:
        delivered: its last delta was made.
        furthest: tokens computed at most so far; preemption doesn't lower it.
        last_token: when its last token was sampled, seconds on the engine's clock.
    """

    live: LiveRequest
    sequence: Sequence
    text: TextStream
    adjustments: Adjustments | None
    delivered: bool = False
    furthest: int = 0
    last_token: float | None = None

    def note_token(self, now: float) -> None:
        """Counts a token that was sampled at `now` in the request's metrics."""
        metrics, before = self.live.metrics, self.last_token
        metrics.output_tokens += 1
        if before is not None:
            gap = now - before
            metrics.gaps += 1
            metrics.decode_seconds += gap
            metrics.itl = max(metrics.itl, gap)
        self.last_token = now


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended, and the sequences that answer it.

    Attributes:
        eos_ids: the model's tokens that end a sequence (none with `ignore_eos`).
        max_tokens: output tokens at most, the context's end included.
        seed: of the request; each of its sequences derives its own from it.
        prompt_logprobs: entries made so far, one a prompt token; None when not asked.
        prompt_scored: prompt tokens that were scored, the first counting as one.
        undelivered: sequences whose last delta was not made yet.
        held: the last known token of a prompt that still arrives, not yet in its sequence.
    """

    request: Request
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    max_tokens: int
    seed: int
    metrics: RequestMetrics
    generations: list[Generation] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_scored: int = 1
    undelivered: int = 1
    held: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        request: Request,
        tokenizer: Tokenizer,
        model_eos: tuple[int, ...],
        context: int,
        seed: int,
    ) -> LiveRequest:
        """A record with its first sequence; `seed` is the request's random stream."""
        params = request.params
        live = cls(
            request=request,
            tokenizer=tokenizer,
            eos_ids=frozenset() if params.ignore_eos else frozenset(model_eos),
            max_tokens=_max_tokens(request, context),
            seed=seed,
            metrics=RequestMetrics(arrival=request.arrival),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            undelivered=params.n,
        )
        tokens = list(request.prompt)
        live.add(Sequence(request=request, index=0, tokens=tokens, seed=derive_seed(seed, 0)))
        return live

    def complete(self, context: int) -> None:
        """Sets anew what depends on the whole prompt, which is there now."""
        self.max_tokens = _max_tokens(self.request, context)
        for generation in self.generations:
            generation.adjustments = self._adjustments()

    @property
    def ended(self) -> bool:
        return all(g.sequence.finished for g in self.generations) and (
            len(self.generations) == self.request.params.n
            or any(g.sequence.finish_reason in _FINAL for g in self.generations)
        )

    def add(self, sequence: Sequence) -> Generation:
        """Takes a sequence into the record."""
        params = self.request.params
        hidden = self.tokenizer.special_ids if params.skip_special_tokens else frozenset()
        generation = Generation(
            live=self,
            sequence=sequence,
            text=TextStream(
                self.tokenizer.token_bytes,
                hidden,
                params.stop_strings,
                params.include_stop_str_in_output,
            ),
            adjustments=self._adjustments(),
        )
        self.generations.append(generation)
        return generation

    def _adjustments(self) -> Adjustments | None:
        params = self.request.params
        return adjustments_for(
            params, self.request.prompt, self.eos_ids | frozenset(params.stop_token_ids)
        )

    def fork(self) -> list[Generation]:
        """The sequences 1 .. n-1, as far computed as the first."""
        parent = self.generations[0].sequence
        parent.forked = True
        return [
            self.add(
                Sequence(
                    request=self.request,
                    index=index,
                    tokens=list(parent.tokens),
                    seed=derive_seed(self.seed, index),
                    computed=parent.computed,
                    cached=parent.cached,
                    forked=True,
                )
            )
            for index in range(1, self.request.params.n)
        ]


def _max_tokens(request: Request, context: int) -> int:
    room, wanted = context - len(request.prompt), request.params.max_tokens
    return room if wanted is None else min(room, wanted)


_FINAL = (FinishReason.ABORT, FinishReason.ERROR)


def take_token(generation: Generation, token: int) -> FinishReason | None:
    """Appends a sampled token to its sequence; why that ended it, as far as the token alone
    can tell: a stop string is found once the text is made."""
    live, sequence = generation.live, generation.sequence
    sequence.tokens.append(token)
    length = sequence.output_length
    if generation.adjustments is not None:
        generation.adjustments.record(token, length)
    if token in live.eos_ids or token in live.request.params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= live.max_tokens else None
