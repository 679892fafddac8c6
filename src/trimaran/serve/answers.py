"""Pieces that OpenAI's answers are made of: usage and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.core.outputs import Logprob, Logprobs, RequestOutput, SequenceDelta

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens of a request, counted as they come."""

    prompt: int
    completion: int = 0
    _cached: dict[str, int] = field(default_factory=dict)

    def add(self, delta: SequenceDelta) -> None:
        """Takes a delta's tokens in."""
        self.completion += len(delta.token_ids)
        if delta.metrics is not None:
            self._cached[delta.request_id] = delta.metrics.cached_tokens

    @property
    def cached(self) -> int:
        return sum(self._cached.values())

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Usage:
        """The usage of whole answers."""
        return cls(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
            {output.request_id: output.cached_tokens for output in outputs},
        )

    def openai(self) -> Json:
        """As in chat completions and completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def chat_logprobs(tokens: Sequence[int], entries: Sequence[Logprobs], top: int) -> Json:
    """Log-probabilities of a chat answer's tokens."""
    content = []
    for token, entry in zip(tokens, entries, strict=True):
        likely = [found for found in entry.values() if found.rank <= top]
        content.append(
            _token(entry[token])
            | {"top_logprobs": [_token(found) for found in sorted(likely, key=_rank)]}
        )
    return {"content": content, "refusal": None}


def text_logprobs(
    tokens: Sequence[int], entries: Sequence[Logprobs | None], top: int, offset: int
) -> Json:
    """Log-probabilities of a completion's tokens.

    Args:
        entries: None for a token that nothing came before.
        offset: characters before the first token.
    """
    found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(tokens, entries, strict=True):
        found["text_offset"].append(offset)
        if entry is None:
            found["tokens"].append("")
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        own = entry[token]
        found["tokens"].append(own.text)
        found["token_logprobs"].append(own.logprob)
        likely = {
            other.text: other.logprob for other in entry.values() if other.rank <= max(top, 1)
        }
        likely.setdefault(own.text, own.logprob)
        found["top_logprobs"].append(likely if top else None)
        offset += len(own.text)
    return found


def prompt_logprobs(entries: Sequence[Logprobs | None] | None) -> list[Json | None] | None:
    """vLLM's `prompt_logprobs`: for each prompt token, token id -> log-probability."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": own.logprob, "rank": own.rank, "decoded_token": own.text}
            for token, own in entry.items()
        }
        for entry in entries
    ]


def _token(found: Logprob) -> Json:
    return {
        "token": found.text,
        "logprob": found.logprob,
        "bytes": list(found.text.encode()),
    }


def _rank(found: Logprob) -> int:
    return found.rank


def merged(found: Sequence[SequenceDelta]) -> list[SequenceDelta]:
    """One delta a sequence: what came since the last time, put together."""
    if len(found) == 1:
        return list(found)
    by_index: dict[int, SequenceDelta] = {}
    for delta in found:
        own = by_index.get(delta.index)
        if own is None:
            by_index[delta.index] = delta
            continue
        own.text += delta.text
        own.token_ids = own.token_ids + delta.token_ids
        if delta.logprobs is not None:
            own.logprobs = (own.logprobs or []) + delta.logprobs
        own.finish_reason = delta.finish_reason or own.finish_reason
        own.stop_reason = delta.stop_reason if own.stop_reason is None else own.stop_reason
        own.metrics = delta.metrics or own.metrics
    return list(by_index.values())
