"""Every class of error the engine raises on purpose.

Each message names the thing, the value, and what to do about it. Anything that
derives from `TrimaranError` is the caller's to read; everything else is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrimaranError(Exception):
    """Base of all errors that Trimaran raises on purpose."""


class ConfigError(TrimaranError):
    """An engine option is unknown, out of range, or does not go with another."""


class ParameterError(TrimaranError, ValueError):
    """A field of a request's sampling parameters is out of range.

    Attributes:
        parameter: the field's name, as the caller spelled it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class RequestError(TrimaranError, ValueError):
    """A request can never be served: an empty or too long prompt, a foreign token id."""


class RequestFailedError(TrimaranError):
    """A request was accepted and then failed; the message says why."""


class CheckpointError(TrimaranError):
    """A model file is truncated, corrupt, foreign, or not what its config says."""


class UnsupportedModelError(CheckpointError):
    """The file is sound, but its architecture or storage type isn't implemented."""


class BuildError(CheckpointError):
    """A built model is stale, truncated, corrupt, for another machine, or can't be written."""


class ModelNotFoundError(TrimaranError):
    """A model name or path leads nowhere."""


class DownloadError(TrimaranError):
    """A model could not be fetched or did not match its checksum."""


class TemplateError(TrimaranError):
    """A chat template is missing, invalid, or refused the messages."""


class CapacityError(TrimaranError):
    """There isn't enough memory for what was asked; the message names the option.

    Attributes:
        request_id: of the one request that asked for too much, where it was one.
    """

    request_id: str | None = None


class BackendError(TrimaranError):
    """A compute back end can't run here, or failed in a step."""


class EngineClosedError(TrimaranError):
    """The engine was closed, or its step loop died; no request can be taken."""


class BusyError(TrimaranError):
    """Too many requests wait already; nothing was taken in.

    Attributes:
        retry_after: seconds after which one more is likely to be taken.
    """

    retry_after: float = 1.0


class EngineUnhealthyError(TrimaranError):
    """A step hangs, so no request can be taken; the engine recovers once it returns."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A ' Did you mean …?' tail for an unknown `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""
