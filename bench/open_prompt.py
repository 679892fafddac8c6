"""Time to the first token after the last character of a prompt that was typed.

    python bench/open_prompt.py [--model smollm2-135m] [--tokens 1000] [--repeats 5]

In turns: a prompt handed in whole, and one of the same length that arrives word by word, by
`AsyncEngine.open`, and is finished a moment after its last words. Every prompt begins anew, so
the prefix cache finds nothing. The clock starts when the whole prompt is handed in, or just
before the last words are appended. Prints medians and spread.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator

from trimaran import AsyncEngine, SamplingParams
from trimaran.core.config import EngineConfig
from trimaran.core.outputs import SequenceDelta
from trimaran.engine.factory import load_engine

_SENTENCE = (
    "the harbour master kept two ledgers and wrote the name of every ship with the hour of its"
    " arrival in the first while the second held what each captain had said of the weather"
)
WORDS = _SENTENCE.split()
PARAMS = SamplingParams(temperature=0, max_tokens=1)


def prompt(number: int, words: int) -> list[str]:
    """Words with the spaces before them; equal texts only for equal numbers."""
    return [f"{number}.", *(f" {WORDS[i * (number + 3) % len(WORDS)]}" for i in range(words))]


async def first(deltas: AsyncIterator[SequenceDelta]) -> float:
    """When the first token came."""
    found = [time.perf_counter() async for delta in deltas if delta.token_ids]
    return found[0]


async def whole(engine: AsyncEngine, words: list[str]) -> float:
    """Seconds from handing in the text to the first token."""
    begin = time.perf_counter()
    return await first(engine.stream("".join(words), PARAMS)) - begin


async def typed(engine: AsyncEngine, words: list[str], seconds: float) -> float:
    """Seconds from the last three words to the first token; the others take `seconds`."""
    async with engine.open(PARAMS) as request:
        for word in words[:-3]:
            request.append(word)
            await asyncio.sleep(seconds / len(words))
        await asyncio.sleep(0.3)
        begin = time.perf_counter()
        for word in words[-3:]:
            request.append(word)
        request.finish()
        return await first(aiter(request)) - begin


async def run(args: argparse.Namespace) -> None:
    """Measures and prints."""
    config = EngineConfig(max_model_len=args.tokens + 64)
    times: dict[str, list[float]] = {"whole": [], "typed": []}
    async with AsyncEngine(load_engine(args.model, config).core) as engine:
        count = len(engine.core.tokenizer.encode("".join(prompt(1, args.tokens - 2))))
        for repeat in range(-1, args.repeats):  # the first to warm up
            for at, kind in enumerate(times):
                words = prompt(1000 + 2 * repeat + at, args.tokens - 2)
                if kind == "whole":
                    taken = await whole(engine, words)
                else:
                    taken = await typed(engine, words, args.seconds)
                if repeat >= 0:
                    times[kind].append(1e3 * taken)
    for kind, found in times.items():
        print(
            f"{kind}: {statistics.median(found):.1f} ms ({min(found):.1f} to {max(found):.1f})"
            f" to the first token, prompts of about {count} tokens"
        )


def main() -> None:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="that typing takes")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
