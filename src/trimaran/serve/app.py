"""The ASGI application: endpoints, errors in OpenAI's shape, and the layers around them."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from trimaran import __version__
from trimaran.core.errors import TrimaranError
from trimaran.serve.errors import INVALID, NOT_FOUND, SERVER, ApiError
from trimaran.serve.genai_metrics import GenAiHistograms
from trimaran.serve.invalid import as_invalid
from trimaran.serve.middleware import Bodies, Keys, RequestIds
from trimaran.serve.openapi import describe
from trimaran.serve.routes import (
    anthropic,
    chat,
    completions,
    context,
    debug,
    embeddings,
    metrics,
    page,
    realtime,
    responses,
    state,
    tokens,
)
from trimaran.serve.service import Service
from trimaran.serve.sse import ClientGoneError, told
from trimaran.serve.traces import Traces

log = logging.getLogger("trimaran")


def create_app(service: Service, traces: Traces | None = None, port: int = 0) -> ASGIApp:
    """The whole application around one service.

    Args:
        port: on which the server listens; 0: the configuration's.
    """
    config = service.config
    api = FastAPI(
        title="Trimaran",
        version=__version__,
        summary="OpenAI-compatible server of one engine",
        docs_url=None,
        redoc_url=None,
    )
    api.state.service = service
    for routes in (chat, completions, responses, anthropic, realtime, tokens, state, metrics):
        api.include_router(routes.router)
    for routes in (embeddings, debug, page):
        api.include_router(routes.router)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(ClientGoneError, _nobody)
    for known in (ApiError, TrimaranError):
        api.add_exception_handler(known, _error)
    api.add_exception_handler(Exception, _bug)
    setattr(api, "openapi", describe(api, bool(config.api_keys)))  # noqa: B010
    app: ASGIApp = api
    app = Bodies(app, config.max_body_bytes, config.body_timeout)
    app = Keys(app, config.api_keys, ("/ui/",))
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    histograms = GenAiHistograms(service.metrics.registry, port or config.port)
    return RequestIds(app, config.access_log, traces, histograms)


async def _error(request: Request, error: Exception) -> Response:
    return _answer(request, told(error))


async def _bug(request: Request, error: Exception) -> Response:
    log.error("a request failed: %s", request.url.path, exc_info=error)
    return _answer(request, told(error))


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.method} {request.url.path} here", "not_found"
    elif error.status_code == 405:
        message, code = f"{request.url.path} doesn't take {request.method}", "method_not_allowed"
    elif error.status_code == 400:
        message, code = "the body can't be read as JSON", "invalid_json"
    kind = NOT_FOUND if error.status_code == 404 else INVALID
    if error.status_code >= 500:
        kind = SERVER
    found = ApiError(error.status_code, message, kind, code=code, headers=error.headers)
    return _answer(request, found)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(request, as_invalid(error.errors()[0], error.body, within=1))


def _answer(request: Request, error: ApiError) -> Response:
    return context.Json(error.body_for(request.url.path), error.status, error.headers)
