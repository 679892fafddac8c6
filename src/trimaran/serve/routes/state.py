"""What the server is and how it fares: models, health, version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trimaran import __version__
from trimaran.serve.errors import ApiError
from trimaran.serve.routes import context
from trimaran.serve.service import Phase, Service

router = APIRouter()


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> Response:
    """The model, under each of its names."""
    service = context.service(request)
    return context.Json(
        {"object": "list", "data": [_model(service, name) for name in service.names]}
    )


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(name: str, request: Request) -> Response:
    """One model."""
    service = context.service(request)
    return context.Json(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, object]:
    loaded = service.loaded
    return {
        "id": name,
        "object": "model",
        "created": loaded.created,
        "owned_by": "trimaran",
        "root": loaded.path.name,
        "parent": None,
        "max_model_len": loaded.either.core.max_model_len,
    }


@router.get("/health", tags=["State"])
async def health(request: Request) -> Response:
    """200 while the process does its work, loading included; 503 once the engine has died."""
    if not context.service(request).healthy:
        raise ApiError(503, "the engine has stopped; restart the server", "server_error")
    return Response(status_code=200)


@router.get("/ready", tags=["State"])
async def ready(request: Request) -> Response:
    """200 when requests are taken; 503 while the model is loaded and once it drains."""
    service = context.service(request)
    able = service.phase is Phase.READY and service.healthy
    return context.Json({"status": service.phase.value}, 200 if able else 503)


@router.get("/version", tags=["State"])
async def version() -> Response:
    """The version of Trimaran."""
    return context.Json({"version": __version__})
