"""What a client is told of a body that doesn't fit its schema: the field at fault, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.serve.errors import ApiError


def as_invalid(first: Mapping[str, Any], body: Any, within: int = 0) -> ApiError:
    """The error for one of pydantic's.

    Args:
        first: the first of pydantic's `errors()`.
        body: what was checked.
        within: parts of the error's place that come before the body itself.
    """
    kind = first["type"]
    param = _path(first["loc"][within:], body, kind in ("missing", "extra_forbidden"))
    if kind == "json_invalid":
        message, code, param = "the body isn't valid JSON", "invalid_json", None
    elif kind == "extra_forbidden":
        message, code = f"unknown field '{param}'; remove it", "unknown_parameter"
    elif kind == "missing":
        message = f"'{param}' is missing" if param else "the body is missing"
        code = "missing_required_parameter"
    else:
        message = f"{param}: {first['msg']}" if param else first["msg"]
        code = "invalid_value"
    return ApiError(400, message, param=param, code=code)


def _path(where: Sequence[str | int], body: Any, absent: bool) -> str | None:
    """The field at fault as a client would write it, "messages.0.role".

    Pydantic names the members of a union on the way ("prompt.list[int].0"), which the body
    doesn't have: they are left out.
    """
    found: list[str] = []
    for i, part in enumerate(where, 1):
        if _has(body, part):
            body = body[part]
        elif not (absent and i == len(where)):
            continue
        found.append(str(part))
    return ".".join(found) or None


def _has(body: Any, part: str | int) -> bool:
    if isinstance(body, Mapping):
        return part in body
    return isinstance(body, list) and isinstance(part, int) and part < len(body)
