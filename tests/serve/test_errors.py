"""What a client is told of an engine that can't take a request now."""

from __future__ import annotations

from trimaran.core.errors import BusyError, EngineUnhealthyError
from trimaran.serve.errors import as_api_error


def test_a_busy_engine_says_when_to_come_again() -> None:
    error = BusyError("the engine is busy")
    error.retry_after = 7.4
    answer = as_api_error(error)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")


def test_an_engine_that_hangs_is_unavailable() -> None:
    answer = as_api_error(EngineUnhealthyError("a step hangs"))
    assert (answer.status, answer.code) == (503, "engine_unhealthy")
    assert int(answer.headers["Retry-After"]) > 0
