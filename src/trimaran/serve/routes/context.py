"""What a handler asks of the request it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from trimaran.serve.service import Service


def service(request: Request) -> Service:
    """The server's one service."""
    return cast(Service, request.app.state.service)


def request_id(request: Request, own: str | None = None) -> str:
    """The id of the request: the body's own, or the one in its header, or a new one."""
    return own or cast(str, request.state.request_id)


def now() -> int:
    """Seconds since 1970, as `created`."""
    return int(time.time())


class Json(Response):
    """An answer of one JSON object, written with the standard library's encoder."""

    media_type = "application/json"

    def __init__(
        self, value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            json.dumps(value, separators=(",", ":")).encode(), status, dict(headers or {})
        )
