"""The verbs evict, pin and unpin of the control socket.

An eviction is a job: ``evict`` starts it, ``job`` returns its progress, ``cancel`` ends it after
its present step. It goes on if the client that started it goes away.
"""

import contextlib
import heapq
import logging
import math
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import trio

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import (
    CommandError,
    KvfsError,
    NoSuchAttribute,
    ServeFailed,
    SourceBusy,
    UsageError,
)
from kvfs.core.types import PATH_MAX_BYTES, InodeNo
from kvfs.engine.eviction.by_command import Order, Progress, carry_out, find
from kvfs.engine.store import Store
from kvfs.pool.policies import path_of
from mount.control.socket import Verb

_log: Final = logging.getLogger(__name__)

#: Larger sizes and times make no sense; times in ns must fit into 64 bits.
_NUMBER_MAX: Final = 1 << 62
#: Requests are answered between two steps; a step takes a millisecond or two.
_PAUSE_S: Final = 0.001
#: A reply is bounded (control_socket.REPLY_MAX_BYTES), and requests wait while it is made. One
#: character of a path may take six bytes of JSON.
_PINS_A_REPLY: Final = 1024
_LETTERS_A_REPLY: Final = 64 << 10


class _Job:
    def __init__(self, number: int) -> None:
        self.number = number
        self.progress = Progress()
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
            _log.exception("eviction by command failed")
            self.error = ServeFailed("the server failed on this eviction; see its log")
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


class EvictVerbs:
    """The verbs of one mount; one eviction at a time."""

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self._store = store
        self._nursery = nursery
        self._numbers = count(1)
        self._job: _Job | None = None

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {
            "evict": self._evict,
            "job": self._progress,
            "cancel": self._cancel,
            "pin": self._pin,
            "unpin": self._unpin,
            "pins": self._pins,
        }

    async def _evict(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start a job: ``paths`` below the mountpoint, ``bytes``, ``older_than_s``, ``dry_run``."""
        if self._job is not None and not self._job.done:
            raise SourceBusy("another eviction is under way")
        order = Order(
            tuple(_texts(args, "paths")),
            _number(args, "bytes", int),
            _number(args, "older_than_s", float),
            args.get("dry_run") is True,
        )
        if not order.dry_run:
            self._refuse_read_only()
        job = self._job = _Job(next(self._numbers))
        steps = carry_out(
            self._store.pool, self._store.namespace, self._store.reclaim, order, job.progress
        )
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

    async def _pin(self, args: dict[str, Any]) -> dict[str, Any]:
        self._refuse_read_only()
        for path, ino in self._found(args):
            try:
                self._store.attributes.set_xattr(ino, PIN, b"1")
            except KvfsError as error:
                if isinstance(error, CommandError):
                    raise
                raise UsageError(f"{path or '/'} cannot be pinned: {error}") from None
        pool = self._store.pool
        held = dict(pool.pins.rows())
        pins = {path_of(pool.index, ino): held.get(ino, 0) for _, ino in self._found(args)}
        return {"pins": pins, "pinned_bytes": pool.pins.pinned_bytes}

    async def _unpin(self, args: dict[str, Any]) -> dict[str, Any]:
        self._refuse_read_only()
        attributes = self._store.attributes
        found = self._found(args)
        if args.get("all") is True:
            for ino, _ in self._store.pool.pins.rows():
                with contextlib.suppress(NoSuchAttribute):  # go on with the rest
                    attributes.remove_xattr(ino, PIN)
        for _, ino in found:
            with contextlib.suppress(NoSuchAttribute):
                attributes.remove_xattr(ino, PIN)
            if attributes.xattr(ino, PIN) == b"1":  # a directory above it is pinned
                attributes.set_xattr(ino, PIN, b"0")
        return {"pins": {}, "pinned_bytes": self._store.pool.pins.pinned_bytes}

    async def _pins(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return some pins, of inodes above ``after``; ``next``: where to go on, or None."""
        pool, after = self._store.pool, _number(args, "after", int) or 0
        rows = [row for row in pool.pins.rows() if row[0] > after]
        pins: dict[str, int] = {}
        told = letters = 0
        for ino, size_bytes in heapq.nsmallest(_PINS_A_REPLY, rows):
            path = _shortened(path_of(pool.index, ino))
            pins[path] = size_bytes
            told, letters, after = told + 1, letters + len(path), ino
            if letters > _LETTERS_A_REPLY:
                break
        more = after if told < len(rows) else None
        return {"pins": pins, "pinned_bytes": pool.pins.pinned_bytes, "next": more}

    def _refuse_read_only(self) -> None:
        if self._store.pool.settings.read_only:
            raise UsageError("the mount is read-only")

    def _found(self, args: dict[str, Any]) -> list[tuple[str, InodeNo]]:
        """Return all paths with their inodes; a missing one is an error before anything changes."""
        pool, namespace = self._store.pool, self._store.namespace
        return [(path, find(pool, namespace, path)) for path in _texts(args, "paths")]


def _shortened(path: str) -> str:
    """Return *path*, or only its end if it is too long for any call."""
    return path if len(path) <= PATH_MAX_BYTES else f"...{path[-PATH_MAX_BYTES:]}"


def _texts(args: dict[str, Any], name: str) -> list[str]:
    value = args.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{name}: must be a list of strings")
    return value


def _number(args: dict[str, Any], name: str, kind: type[int] | type[float]) -> Any:  # noqa: ANN401
    value = args.get(name)
    if value is not None and (not isinstance(value, (int, kind)) or isinstance(value, bool)):
        raise UsageError(f"{name}: must be a number")
    if value is not None and not (math.isfinite(value) and abs(value) <= _NUMBER_MAX):
        raise UsageError(f"{name}: {value} is out of range")
    return value
