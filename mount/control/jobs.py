"""The long work that a control request starts: a job, of which one runs at a time.

The request that starts it answers at once with its number; ``job`` returns its progress, ``cancel``
ends it after its present step. The job goes on if the client that started it goes away.
"""

import logging
from collections.abc import Iterator
from itertools import count
from typing import Any, Final, Protocol

import trio

from kvfs.core.errors import KvfsError, ServeFailed, SourceBusy, UsageError
from mount.control.socket import Verb

_log: Final = logging.getLogger(__name__)

#: Between two steps, so that requests are answered; a step takes a millisecond or two.
_PAUSE_S: Final = 0.001


class Shown(Protocol):
    """The progress of a job."""

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""


class _Job:
    def __init__(self, number: int, progress: Shown) -> None:
        self.number = number
        self.progress = progress
        self.scope = trio.CancelScope()
        self.done = False
        self.error: KvfsError | None = None

    async def run(self, steps: Iterator[None]) -> None:
        try:
            with self.scope:
                for _ in steps:
                    await trio.sleep(_PAUSE_S)
        except KvfsError as error:
            self.error = error
        except Exception:
            # A failed job must not end the mount.
            _log.exception("a job by command failed")
            self.error = ServeFailed("the server failed on this command; see its log")
        finally:
            self.done = True

    def shown(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        cancelled = self.scope.cancelled_caught
        return {
            "job": self.number,
            "done": self.done,
            "cancelled": cancelled,
            **self.progress.shown(),
        }


class Jobs:
    """The present job of one mount, or the last one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._numbers = count(1)
        self._job: _Job | None = None

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"job": self._progress, "cancel": self._cancel}

    def start(self, steps: Iterator[None], progress: Shown) -> dict[str, Any]:
        """Begin to do *steps*; return the answer. Raises SourceBusy while another job runs."""
        if self._job is not None and not self._job.done:
            raise SourceBusy("another `kvfs evict`, `pin`, `unpin` or `verify` is under way")
        job = self._job = _Job(next(self._numbers), progress)
        self._nursery.start_soon(job.run, steps)
        return {"job": job.number}

    def _known(self, args: dict[str, Any]) -> _Job:
        if self._job is None or args.get("job") != self._job.number:
            raise UsageError("no such job; a later one may have taken its place")
        return self._job

    async def _progress(self, args: dict[str, Any]) -> dict[str, Any]:
        return self._known(args).shown()

    async def _cancel(self, args: dict[str, Any]) -> dict[str, Any]:
        job = self._known(args)
        job.scope.cancel()
        return {"job": job.number}
