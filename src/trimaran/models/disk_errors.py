"""What to tell when the disk refuses."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.core.errors import DownloadError


@contextmanager
def clear_disk_errors(doing: str, folder: Path) -> Iterator[None]:
    """Turns an `OSError` into a `DownloadError` that says what to do.

    Args:
        doing: what can't be done with a model and `folder`, such as "stored in".
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (
                f"there is no space left for a model in {folder}; free some, or set"
                " TRIMARAN_CACHE to a folder on another disk"
            )
        else:
            message = (
                f"a model can't be {doing} {folder} ({error.strerror or error}); check its"
                " permissions, or set TRIMARAN_CACHE to another folder"
            )
        raise DownloadError(message) from error
