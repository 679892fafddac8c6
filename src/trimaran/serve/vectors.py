"""Vectors of texts, by an encoder or by pooling the rows of a model that generates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from trimaran.core.errors import BusyError
from trimaran.engine.async_engine import RequestStream
from trimaran.engine.encoder_engine import EncoderStream
from trimaran.engine.pooling import Vector
from trimaran.serve.service import Service

Start = Callable[[list[int]], EncoderStream | RequestStream]


async def encoded(
    service: Service, prompts: Sequence[list[int]], name: str, *, priority: int = 0
) -> list[Vector]:
    """The encoder's vectors of texts, float32 [width] each. Cancelling aborts them all.

    Raises:
        ApiError, TrimaranError: as `pooled`.
    """
    encoder = service.loaded.encoder
    assert encoder is not None
    for prompt in prompts:
        encoder.check(prompt)
    return await _vectors(service, prompts, lambda ids: encoder.start(ids, name, priority))


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

    Raises:
        ApiError: no room.
        TrimaranError: a text could never be served: none was started then; or one failed: the
            others are aborted.
    """
    engine = service.engine
    for prompt in prompts:
        engine.check_pooled(prompt, pooling)

    def start(ids: list[int]) -> RequestStream:
        own = service.own_name(name)
        return engine.pool(ids, pooling, request_id=own, priority=priority, cache_salt=cache_salt)

    return await _vectors(service, prompts, start)


async def _vectors(service: Service, prompts: Sequence[list[int]], start: Start) -> list[Vector]:
    """Of one request half of the engine's seats are filled at most, so that however many texts
    it has, others needn't wait for all of them; nor is it refused for its own."""
    engine = service.loaded.either
    most = max(1, engine.core.config.max_num_seqs // 2)
    left = deque(enumerate(prompts))
    running: dict[asyncio.Task[Vector], int] = {}
    found: dict[int, Vector] = {}
    with service.texts() as streams:
        try:
            while left or running:
                while left and len(running) < most:
                    if running and not engine.has_room():
                        break  # once some of our own have ended there may be
                    try:
                        stream = start(left[0][1])
                    except BusyError:  # another was quicker
                        if not running:
                            raise
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
