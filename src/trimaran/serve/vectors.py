"""Vectors of texts, by an encoder or by pooling the rows of a model that generates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from trimaran.core.errors import BusyError
from trimaran.core.outputs import Vector
from trimaran.engine.async_engine import RequestStream
from trimaran.serve.service import Service


async def encoded(
    service: Service, prompts: Sequence[list[int]], name: str, *, priority: int = 0
) -> list[Vector]:
    """The encoder's vectors of texts, float32 [width] each. Cancelling aborts them all.

    Raises:
        ApiError: no room.
        TrimaranError: a text can't be encoded; the others are aborted.
    """
    encoder = service.loaded.encoder
    assert encoder is not None
    with service.texts() as streams:
        started = [encoder.start(prompt, name, priority) for prompt in prompts]
        streams += started
        return await asyncio.gather(*(stream.vector() for stream in started))


async def pooled(
    service: Service,
    prompts: Sequence[list[int]],
    pooling: str,
    name: str,
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> list[Vector]:
    """Vectors of texts by a model that generates, float32 [width] each, not normalised.
    Cancelling aborts them all.

    Of one request half of the engine's seats are filled at most, so that however many texts it
    has, others needn't wait for all of them.

    Raises:
        ApiError: no room.
        TrimaranError: a text could never be served: none was started then; or one failed: the
            others are aborted.
    """
    engine = service.engine
    for prompt in prompts:
        engine.check_pooled(prompt, pooling)
    most = max(1, engine.core.config.max_num_seqs // 2)
    left = deque(enumerate(prompts))
    running: dict[asyncio.Task[Vector], int] = {}
    found: dict[int, Vector] = {}

    def start(prompt: list[int]) -> RequestStream | None:
        try:
            return engine.pool(
                prompt,
                pooling,
                request_id=service.own_name(name),
                priority=priority,
                cache_salt=cache_salt,
            )
        except BusyError:  # once some of our own have ended there may be room
            if not running:
                raise
            return None

    with service.texts() as streams:
        try:
            while left or running:
                while left and len(running) < most:
                    stream = start(left[0][1])
                    if stream is None:
                        break
                    streams.append(stream)
                    running[asyncio.create_task(stream.vector())] = left.popleft()[0]
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    found[running.pop(task)] = task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return [found[i] for i in range(len(prompts))]
