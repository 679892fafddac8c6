"""`GET /metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from trimaran.serve.routes import context

router = APIRouter(tags=["State"])


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(context.service(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
