"""The web page at `/`, its files, and the reference of the API at `/docs`."""

from __future__ import annotations

from functools import cache
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from trimaran.serve.errors import ApiError

router = APIRouter(include_in_schema=False)

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere is loaded, and no other page may frame this one.
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/docs")
async def docs() -> Response:
    """The reference of the API."""
    return _file("docs.html")


@router.get("/favicon.ico")
async def favicon() -> Response:
    """The sign of Trimaran."""
    return _file("favicon.svg")


@router.get("/ui/{name}")
async def file(name: str) -> Response:
    """A file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    if name not in _names():
        raise ApiError(404, f"there is no '{name}' here", "not_found_error", code="not_found")
    return Response(_read(name), media_type=_KINDS[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _names() -> frozenset[str]:
    folder = resources.files("trimaran.serve.ui")
    return frozenset(
        entry.name for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _KINDS
    )


@cache
def _read(name: str) -> bytes:
    return (resources.files("trimaran.serve.ui") / name).read_bytes()
