"""Adds up a request's deltas to its whole answer."""

from __future__ import annotations

from trimaran.core.errors import RequestFailedError
from trimaran.core.outputs import CompletionOutput, RequestOutput, SequenceDelta
from trimaran.core.request import FinishReason


def sequences_left(left: int, delta: SequenceDelta) -> int:
    """How many of a request's sequences are still to end once `delta` has come.

    An abort or an error ends all of them, those too that had not begun.
    """
    if delta.error is not None or delta.finish_reason is FinishReason.ABORT:
        return 0
    return left - (delta.finish_reason is not None)


class OutputCollector:
    """Collects one request's deltas.

    Attributes:
        output: the answer so far.
        error: why the request failed, or None.
    """

    def __init__(self, request_id: str, prompt: str | None, prompt_ids: list[int], n: int) -> None:
        self._open = n
        self._text: list[list[str]] = [[] for _ in range(n)]
        self.error: str | None = None
        self.output = RequestOutput(
            request_id, prompt, prompt_ids, [CompletionOutput(index) for index in range(n)]
        )

    def add(self, delta: SequenceDelta) -> bool:
        """Takes a delta in; returns whether the request has now ended."""
        output = self.output.outputs[delta.index]
        if delta.text:
            self._text[delta.index].append(delta.text)
        output.token_ids += delta.token_ids
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs
            chosen = (found[t] for t, found in zip(delta.token_ids, delta.logprobs, strict=True))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                logprob.logprob for logprob in chosen
            )
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        if delta.vector is not None:
            self.output.vector = delta.vector
        self.output.metrics = delta.metrics or self.output.metrics
        self.error = delta.error or self.error
        if delta.finish_reason is not None:
            output.text = "".join(self._text[delta.index])
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason
        self._open = sequences_left(self._open, delta)
        self.output.finished = self._open == 0
        return self.output.finished

    def result(self) -> RequestOutput:
        """The whole answer.

        Raises:
            RequestFailedError: the request failed.
        """
        if self.error is not None:
            raise RequestFailedError(f"request '{self.output.request_id}' failed: {self.error}")
        return self.output
