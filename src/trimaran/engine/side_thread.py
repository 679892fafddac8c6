"""A thread that does one piece of work while its owner is in native code."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class SideThread:
    """Runs one job at a time beside its owner, who waits for it before going on.

    Between `start` and `join` the job has the shared state to itself: the owner is to be in
    code that touches none of it. So nothing needs a lock, and the order of things is the same
    as if the job had been run by the owner.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Job) -> None:
        """Begins a job; the one before must have been joined."""
        self._jobs.put(job)

    def join(self) -> None:
        """Waits for the job; raises what it raised."""
        error = self._done.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread; nothing may be running."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
