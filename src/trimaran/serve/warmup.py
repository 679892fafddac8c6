"""Dummy requests before the first real one."""

from __future__ import annotations

import asyncio

from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.encoder_engine import EncoderEngine

SALT = "trimaran warm-up"
LONGEST = 512
"""Tokens of the long prompt: every kernel of a prefill is touched with fewer."""


async def warm_up(engine: AsyncEngine, rounds: int) -> None:
    """Touches each kind of work once a round: a long prompt, a batch of decodes, greedy and
    drawn tokens, log-probabilities. Its prefixes are forgotten at the end.

    Args:
        rounds: 0 does nothing.
    """
    core = engine.core
    room = core.max_model_len - 5
    if rounds == 0 or room < 1:
        return
    longest = min(room, core.config.max_num_batched_tokens, LONGEST)
    vocabulary = core.model.vocab_size
    for _ in range(rounds):
        kinds = [
            (longest, SamplingParams(temperature=0, max_tokens=1)),
            (min(room, 16), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)),
            (min(room, 16), SamplingParams(top_k=20, max_tokens=4, ignore_eos=True)),
            (min(room, 1), SamplingParams(top_p=0.9, logprobs=1, max_tokens=4, ignore_eos=True)),
        ]
        await asyncio.gather(
            *(
                engine.generate(
                    [(i * 31 + 7 * kind) % vocabulary for i in range(length)],
                    params,
                    cache_salt=SALT,
                )
                for kind, (length, params) in enumerate(kinds)
            )
        )
    engine.reset_prefix_cache()


async def warm_up_encoder(engine: EncoderEngine, rounds: int) -> None:
    """Touches the weights: one text a round."""
    vocabulary = engine.core.model.vocab_size
    for _ in range(rounds):
        ids = [(i * 31 + 7) % vocabulary for i in range(min(16, engine.core.max_model_len))]
        await engine.start(ids, "warm-up").vector()
