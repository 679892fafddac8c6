"""From what a step did to sequences to the deltas their callers get.

A step leaves events: a token was sampled, a request ended. They are turned into text, entries
of log-probabilities and deltas later, in order, while the next step computes: nothing of that
is needed to begin it. The one thing that only the text can tell is a stop string. By then the
next step has begun with the sequence still in it; its row there is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.core.outputs import Logprobs, SequenceDelta
from trimaran.core.request import FinishReason
from trimaran.core.sampling_batch import Int32, Scores
from trimaran.engine.generation import Generation, LiveRequest
from trimaran.engine.pooling import Vector
from trimaran.engine.sampling import entry
from trimaran.models.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class SampledToken:
    """A token was appended to a sequence.

    Attributes:
        length: of the output with it.
        reason: set where the token alone ends the sequence (not by a stop string).
        place: of its log-probabilities in `scores`; None where none were asked for.
        time: seconds on the engine's clock.
    """

    generation: Generation
    token: int
    length: int
    reason: FinishReason | None
    scores: Scores | None
    place: int
    time: float


@dataclass(slots=True, eq=False)
class ScoredPrompt:
    """Some of a prompt's tokens were scored."""

    live: LiveRequest
    targets: Int32
    scores: Scores


@dataclass(slots=True, eq=False)
class EndedRequest:
    """A request's sequences that had not ended were ended from outside."""

    live: LiveRequest
    generations: list[Generation]
    reason: FinishReason
    error: str | None


@dataclass(slots=True, eq=False)
class PooledPrompt:
    """A prompt was computed of which a vector is wanted; its sequence has ended with that.

    Attributes:
        time: seconds on the engine's clock.
    """

    generation: Generation
    vector: Vector
    time: float


Event = SampledToken | ScoredPrompt | PooledPrompt | EndedRequest


@dataclass(slots=True)
class Assembled:
    """Deltas of some events by request, and the sequences that turned out to have ended.

    Attributes:
        deltas: a request's together, in order.
        stopped: ended by a stop string; still to be taken out of the scheduler.
        answered: requests of which all sequences have ended by themselves.
    """

    deltas: dict[LiveRequest, list[SequenceDelta]] = field(default_factory=dict)
    stopped: list[Generation] = field(default_factory=list)
    answered: list[LiveRequest] = field(default_factory=list)

    def add(self, live: LiveRequest, delta: SequenceDelta) -> None:
        self.deltas.setdefault(live, []).append(delta)


def assemble(events: list[Event], tokenizer: Tokenizer) -> Assembled:
    """Makes text and deltas of events, which must come in the order in which they happened."""
    out = Assembled()
    for event in events:
        if isinstance(event, SampledToken):
            _add_token(out, event, tokenizer)
        elif isinstance(event, EndedRequest):
            _add_end(out, event)
        elif isinstance(event, PooledPrompt):
            _add_vector(out, event)
        else:
            _add_prompt_scores(event, tokenizer)
    return out


def _add_token(out: Assembled, event: SampledToken, tokenizer: Tokenizer) -> None:
    generation, token, reason = event.generation, event.token, event.reason
    live = generation.live
    params = live.request.params
    delta = SequenceDelta(live.request.id, generation.sequence.index, token_ids=[token])
    if reason is FinishReason.STOP:  # its text is not part of the answer
        delta.text = generation.text.finish()
        delta.stop_reason = None if token in live.eos_ids else token
    else:
        delta.text, stop = generation.text.push(token, event.length >= params.min_tokens)
        if stop is not None:
            delta.stop_reason = stop
            if reason is None:
                out.stopped.append(generation)
            reason = FinishReason.STOP
        elif reason is not None:
            delta.text += generation.text.finish()
    if event.scores is not None:
        delta.logprobs = [entry(event.scores, event.place, token, params.logprobs or 0, tokenizer)]
    generation.note_token(event.time)
    if live.metrics.first_token is None:
        live.metrics.first_token = event.time
        delta.prompt_logprobs = live.prompt_logprobs
    delta.metrics = live.metrics
    if reason is not None:
        delta.finish_reason = reason
        generation.delivered = True
        live.undelivered -= 1
        if live.undelivered == 0:
            out.answered.append(live)
            if live.metrics.finished is None:
                live.metrics.finished = event.time
    out.add(live, delta)


def _add_vector(out: Assembled, event: PooledPrompt) -> None:
    generation, live = event.generation, event.generation.live
    live.metrics.first_token = event.time
    generation.delivered = True
    live.undelivered = 0
    out.answered.append(live)
    out.add(
        live,
        SequenceDelta(
            live.request.id,
            generation.sequence.index,
            finish_reason=FinishReason.STOP,
            metrics=live.metrics,
            vector=event.vector,
        ),
    )


def _add_end(out: Assembled, event: EndedRequest) -> None:
    live = event.live
    live.undelivered = 0
    for generation in event.generations:
        if generation.delivered:  # by a stop string, which was found after the end was wanted
            continue
        generation.delivered = True
        out.add(
            live,
            SequenceDelta(
                live.request.id,
                generation.sequence.index,
                text=generation.text.finish(),
                finish_reason=event.reason,
                error=event.error,
                metrics=live.metrics,
            ),
        )


def _add_prompt_scores(event: ScoredPrompt, tokenizer: Tokenizer) -> None:
    top, found = event.live.request.params.prompt_logprobs, event.live.prompt_logprobs
    assert top is not None and found is not None
    entries: list[Logprobs] = [
        entry(event.scores, place, int(token), top, tokenizer)
        for place, token in enumerate(event.targets)
    ]
    found += entries
