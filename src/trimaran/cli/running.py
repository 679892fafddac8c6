"""One request of a command while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from trimaran.core.outputs import RequestOutput, SequenceDelta
from trimaran.engine.collector import OutputCollector

if TYPE_CHECKING:
    from trimaran.cli.records import Ask
    from trimaran.engine.llm import LLM


class Running:
    """A request that was handed to the engine; it computes whether it is watched or not."""

    def __init__(self, llm: LLM, ask: Ask) -> None:
        """
        Raises:
            RequestError, TemplateError: the request can't be served.
        """
        self.ask = ask
        ids, text = _tokens(llm, ask)
        self._collector = OutputCollector("", text, ids, ask.params.n)
        self._start = time.perf_counter()
        self._first = self._last = 0.0
        self._deltas = llm.start(ids, ask.params, priority=ask.priority, slo=ask.slo)

    def texts(self) -> Iterator[str]:
        """The answer's text as it comes, which may be empty, once a step.

        Raises:
            RequestFailedError: it failed while running.
        """
        for delta in self._deltas:
            self._take(delta)
            yield delta.text

    def finish(self) -> RequestOutput:
        """The whole answer, when it is there; errors as `texts`."""
        for delta in self._deltas:
            self._take(delta)
        return self._collector.result()

    def stop(self) -> None:
        """Ends the request where it hasn't ended; may be called twice."""
        self._deltas.close()

    def rates(self) -> str:
        """One line: tokens in and out and how fast, as the caller saw it."""
        output = self._collector.output
        made = sum(len(one.token_ids) for one in output.outputs)
        prompt = f"{len(output.prompt_token_ids)} prompt tokens"
        if output.cached_tokens:
            prompt += f" ({output.cached_tokens} cached)"
        if not made:
            return f"{prompt} · no tokens generated"
        parts = [prompt, f"first token after {self._first - self._start:.3f} s"]
        generated = f"{made} tokens generated"
        if made > 1 and self._last > self._first:
            generated += f", {(made - 1) / (self._last - self._first):.1f} tokens/s"
        return " · ".join([*parts, generated])

    def _take(self, delta: SequenceDelta) -> None:
        self._collector.add(delta)
        if delta.token_ids:
            self._last = time.perf_counter()
            self._first = self._first or self._last


def _tokens(llm: LLM, ask: Ask) -> tuple[list[int], str | None]:
    """Token ids of what was asked, and its text where it came as text."""
    if ask.chat:
        text = llm.render_chat(cast("list[dict[str, str]]", ask.prompt))
        # The template wrote the special tokens itself.
        return llm.tokenizer.encode(text, add_special_tokens=False), text
    if isinstance(ask.prompt, str):
        return llm.tokenizer.encode(ask.prompt), ask.prompt
    return cast("list[int]", ask.prompt), None
