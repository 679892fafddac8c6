"""`GET /debug/state` and `/debug/blocks`: what runs, what waits, where the memory is."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from trimaran.serve.routes import context
from trimaran.serve.snapshot import block_map, snapshot

router = APIRouter(prefix="/debug", tags=["State"])


@router.get("/state")
async def state(request: Request, since: int = Query(-1, ge=-1, lt=2**63)) -> Response:
    """The requests that run and wait, the use of blocks, and the steps after number `since`."""
    service = context.service(request)
    engine = service.loaded.either
    core = engine.core
    found = await engine.ask(partial(snapshot, since=since))
    found["server"] = {
        "phase": service.phase,
        "model": service.names[0],
        "active_requests": service.active,
        "finished_requests": service.finished,
        "max_model_len": core.max_model_len,
        "max_num_seqs": core.config.max_num_seqs,
        "max_num_batched_tokens": core.config.max_num_batched_tokens,
        "backend": core.backend.describe(),
    }
    found["latency"] = service.metrics.histograms()
    return context.Json(found)


@router.get("/blocks")
async def blocks(request: Request) -> Response:
    """The map of the KV blocks."""
    return context.Json(await context.service(request).loaded.either.ask(block_map))
