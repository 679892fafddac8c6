"""Errors as a client sees them: a status, and OpenAI's body with a type, a parameter, a code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.core.errors import (
    BusyError,
    CapacityError,
    EngineClosedError,
    EngineUnhealthyError,
    ParameterError,
    RequestError,
    RequestFailedError,
    TemplateError,
    TrimaranError,
)

INVALID, AUTH, NOT_FOUND = "invalid_request_error", "authentication_error", "not_found_error"
RATE, SERVER = "rate_limit_error", "server_error"


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type`.
        param: the field at fault, as the client spelled it.
        code: a short constant word for programs.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's shape."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else INVALID)
        message = self.message if self.param is None else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def body_for(self, path: str) -> dict[str, Any]:
        """In the shape of the API to which a path belongs."""
        of_anthropic = path.endswith(("/v1/messages", "/v1/messages/count_tokens"))
        return self.anthropic() if of_anthropic else self.body()


_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def unsupported(param: str, why: str) -> ApiError:
    """A field that is known and can't be honoured."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def busy(message: str, retry_after: float) -> ApiError:
    """More than the server takes at once; `retry_after` in seconds."""
    return ApiError(
        429,
        message,
        RATE,
        code="too_many_requests",
        headers={"Retry-After": str(max(1, round(retry_after)))},
    )


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """The server runs, but can't take a request now."""
    return ApiError(
        503, message, SERVER, code=code, headers={"Retry-After": str(max(1, round(retry_after)))}
    )


def timed_out(seconds: float) -> ApiError:
    """The server's own limit; a client that tried again would only meet it again."""
    return ApiError(
        504,
        f"the request took longer than {seconds:g} s, the limit of this server; ask for fewer"
        " tokens",
        SERVER,
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def as_api_error(error: TrimaranError) -> ApiError:
    """What a client is told of an engine's error."""
    if isinstance(error, ParameterError):
        return ApiError(400, str(error), param=error.parameter, code="invalid_value")
    if isinstance(error, TemplateError):
        return ApiError(400, str(error), param="messages", code="invalid_messages")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, BusyError):
        return busy(str(error), error.retry_after)
    if isinstance(error, EngineUnhealthyError):
        return unavailable(str(error), "engine_unhealthy", 10.0)
    if isinstance(error, EngineClosedError):
        return unavailable(str(error), "engine_closed")
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="capacity")
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), SERVER, code="request_failed")
    return ApiError(500, str(error), SERVER, code="internal_error")
