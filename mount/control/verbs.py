"""The verbs evict, pin, unpin, verify, hottest and record of the control socket.

Long work is a job, of which one runs at a time. The request that starts it answers at once with its
number; ``job`` returns its progress, ``cancel`` ends it after its present step. The job goes on if
the client that started it goes away. All arguments are checked: any program of root may send
anything.

``record`` begins a recording for `kvfs record`, ``recorded`` returns what was used since the last
call. Its client asks as often as it likes to know; nothing is kept for it but what tells the next
look where to begin, and blocks that go in between (touch_recordings.py).
"""

import contextlib
import heapq
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any, Final, Protocol

import trio

from kvfs.core.errors import CommandError, DeadInode, KvfsError, ServeFailed, SourceBusy, UsageError
from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.engine.by_command import (
    EvictionOrder,
    EvictionProgress,
    PinProgress,
    carry_out,
    pin,
    pin_matching,
    unpin,
    unpin_all,
    unpin_matching,
)
from kvfs.engine.durability.verifier import VerifyProgress, verify_all
from kvfs.engine.names.named import (
    STEP,
    Named,
    files_below,
    find,
    hottest,
    named,
    path_and_size,
    pattern_of,
)
from kvfs.engine.store import Store
from kvfs.engine.store_figures import for_blocks_bytes
from kvfs.pool.figures.touch_recordings import KeyedNames
from kvfs.pool.rules.paths import path_of
from mount.control.socket import Verb

_log: Final = logging.getLogger(__name__)

#: A reply is bounded (control_socket.REPLY_MAX_BYTES), and requests wait while it is made. One
#: character of a path may take six bytes of JSON.
_PINS_A_REPLY: Final = 1024
_LETTERS_A_REPLY: Final = 64 << 10
_BLOCKS_A_REPLY: Final = 256
#: Pins set for one request before others are answered; some 60 us each.
_PINS_A_TURN: Final = 32
#: Between two steps, so that requests are answered; a step takes a millisecond or two.
_PAUSE_S: Final = 0.001
#: Larger sizes and times make no sense; times in ns must fit into 64 bits.
_NUMBER_MAX: Final = 1 << 62

CatchUp = Callable[[], Awaitable[None]]


class Shown(Protocol):
    """The progress of a job."""

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""


class _Job:
    def __init__(self, number: int, progress: Shown, catch_up: CatchUp) -> None:
        self.number = number
        self._catch_up = catch_up
        self.progress = progress
        self.scope = trio.CancelScope()
        self.done = False
        self.error: KvfsError | None = None

    async def run(self, steps: Iterator[None]) -> None:
        try:
            with self.scope:
                for _ in steps:
                    await trio.sleep(_PAUSE_S)
                await self._catch_up()
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

    def __init__(self, catch_up: CatchUp, nursery: trio.Nursery) -> None:
        self._catch_up = catch_up
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
        job = self._job = _Job(next(self._numbers), progress, self._catch_up)
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


class CommandVerbs:
    """The verbs of one mount; one eviction, or pinning by a pattern, at a time."""

    def __init__(self, store: Store, catch_up: CatchUp, nursery: trio.Nursery) -> None:
        """*catch_up* waits for a moment until the kernel knows which names are gone.

        A job is done then: who runs `kvfs evict` looks for the names next.
        """
        self._store = store
        self._jobs = Jobs(catch_up, nursery)
        #: The list that a client of ``hottest`` reads at the moment; a later one replaces it.
        self._hot: list[InodeNo] = []

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {
            "evict": self._evict,
            "pin": self._pin,
            "unpin": self._unpin,
            "verify": self._verify,
            "pins": self._pins,
            "hottest": self._hottest,
            **self._jobs.table(),
            **RecordVerbs(self._store).table(),
        }

    async def _evict(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start a job: ``paths``, ``match``, ``bytes``, ``unused_for_s``, ``dry_run``."""
        order = EvictionOrder(
            self._named(args),
            _number(args, "bytes", int),
            _number(args, "unused_for_s", float),
            args.get("dry_run") is True,
        )
        if not order.dry_run:
            self._refuse_read_only()
        store, progress = self._store, EvictionProgress()
        steps = carry_out(store.pool, store.namespace, store.reclaim, order, progress)
        return self._jobs.start(steps, progress)

    async def _pin(self, args: dict[str, Any]) -> dict[str, Any]:
        """Pin ``paths``; with ``match`` as a job. With ``dry_run`` only look whether they exist."""
        self._refuse_read_only()
        what = self._named(args)
        if what.match is not None:
            progress = PinProgress()
            return self._jobs.start(pin_matching(self._store, what, progress), progress)
        found = self._found(args)
        pool = self._store.pool
        if args.get("dry_run") is not True:
            for done, (path, ino) in enumerate(found, 1):
                self._pin_one(path, ino)
                if done % _PINS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
        pins = {path_of(pool.index, ino): pool.rules.pins.held_bytes(ino) or 0 for _, ino in found}
        return {"pins": pins, "pinned_bytes": pool.rules.pins.pinned_bytes}

    def _pin_one(self, path: str, ino: InodeNo) -> None:
        try:
            pin(self._store, ino)
        except CommandError:
            raise
        except KvfsError as error:
            raise UsageError(f"{path or '/'} cannot be pinned: {error}") from None

    async def _verify(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start a job: compare the blocks of ``paths`` and ``match`` with their checksums."""
        self._refuse_read_only()
        store, progress, what = self._store, VerifyProgress(), self._named(args)
        inos = (
            ino
            for root in named(store.pool.index, store.namespace, what)
            for ino in ((STEP,) if root == STEP else files_below(store.pool.index, root))
        )
        everything = what.match is None and any(not path.strip("/") for path in what.paths)
        return self._jobs.start(
            verify_all(store.verifier, inos, progress, STEP, everything=everything), progress
        )

    async def _unpin(self, args: dict[str, Any]) -> dict[str, Any]:
        """Unpin ``paths``; with ``match`` as a job, and so with ``all``, which is every pin."""
        self._refuse_read_only()
        what = self._named(args)
        if args.get("all") is True:
            progress = PinProgress()
            return self._jobs.start(unpin_all(self._store, progress), progress)
        if what.match is not None:
            progress = PinProgress()
            return self._jobs.start(unpin_matching(self._store, what, progress), progress)
        found = self._found(args)
        if args.get("dry_run") is not True:
            for done, (_, ino) in enumerate(found, 1):
                with contextlib.suppress(DeadInode):  # it has gone meanwhile
                    unpin(self._store, ino)
                if done % _PINS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
        return {"pins": {}, "pinned_bytes": self._store.pool.rules.pins.pinned_bytes}

    async def _pins(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return some pins, of inodes above ``after``; ``next``: where to go on, or None."""
        pool, after = self._store.pool, _number(args, "after", int) or 0
        rows = [row for row in pool.rules.pins.rows() if row[0] > after]
        pins: dict[str, int] = {}
        told = letters = 0
        for ino, size_bytes in heapq.nsmallest(_PINS_A_REPLY, rows):
            path = path_of(pool.index, ino)
            pins[path] = size_bytes
            told, letters, after = told + 1, letters + len(path), ino
            if letters > _LETTERS_A_REPLY:
                break
        more = after if told < len(rows) else None
        return {"pins": pins, "pinned_bytes": pool.rules.pins.pinned_bytes, "next": more}

    async def _hottest(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return some blocks, those used last first; ``next``: where to go on, or None."""
        after, pool = _number(args, "after", int) or 0, self._store.pool
        if after <= 0:
            self._hot = await trio.to_thread.run_sync(hottest, pool.rules.heat.columns())
            after = 0
        hot, blocks, letters = self._hot, list[tuple[str, int]](), 0
        for ino in hot[after : after + _BLOCKS_A_REPLY]:
            after += 1
            if (block := path_and_size(pool.index, ino)) is not None:
                blocks.append(block)
                letters += len(block[0])
            if letters > _LETTERS_A_REPLY:
                break
        return {"blocks": blocks, "next": after if after < len(hot) else None}

    def _refuse_read_only(self) -> None:
        if self._store.pool.settings.read_only:
            raise UsageError("the mount is read-only")

    def _named(self, args: dict[str, Any]) -> Named:
        """Return what ``paths`` and ``match`` name. Raises UsageError."""
        what = Named(tuple(_texts(args, "paths")), _text(args, "match"))
        pattern_of(what)
        return what

    def _found(self, args: dict[str, Any]) -> list[tuple[str, InodeNo]]:
        """Return all paths with their inodes; a missing one is an error before anything changes."""
        pool, namespace = self._store.pool, self._store.namespace
        return [(path, find(pool.index, namespace, path)) for path in _texts(args, "paths")]


def _texts(args: dict[str, Any], name: str) -> list[str]:
    """Return a list of strings, empty if it is not given. Raises UsageError."""
    value = args.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{name}: must be a list of strings")
    return value


def _text(args: dict[str, Any], name: str) -> str | None:
    """Return a string, None if it is not given. Raises UsageError."""
    value = args.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name}: must be a string")
    return value


def _number(args: dict[str, Any], name: str, kind: type[int] | type[float]) -> Any:  # noqa: ANN401
    """Return a number, None if it is not given. Raises UsageError."""
    value = args.get(name)
    if value is not None and (not isinstance(value, (int, kind)) or isinstance(value, bool)):
        raise UsageError(f"{name}: must be a number")
    if value is not None and not (math.isfinite(value) and abs(value) <= _NUMBER_MAX):
        raise UsageError(f"{name}: {value} is out of range")
    return value


#: Blocks of a reply: some 6 KiB, made in 0.1 ms, while requests wait.
BLOCKS_A_REPLY: Final = 512


class RecordVerbs:
    """The verbs of one mount."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"record": self._record, "recorded": self._recorded}

    async def _record(self, args: dict[str, Any]) -> dict[str, Any]:
        """Begin; ``key`` (hex) is what numbers follow from. Return number and sizes."""
        pool = self._store.pool
        if pool.settings.read_only:
            raise UsageError("the mount is read-only, and does not know which blocks are used")
        names = KeyedNames(_key_of(args))
        return {
            "recording": pool.figures.recordings.begin(names),
            "name": pool.settings.name,
            "capacity_bytes": pool.space.taken.capacity_bytes,
            "for_blocks_bytes": for_blocks_bytes(pool),
            **self._so_far(),
        }

    async def _recorded(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return what was used since the last call; with ``end`` the recording is over then.

        ``more``: there is more of it, so call again. ``gone``: there is no such recording.
        """
        number, recordings = args.get("recording", 0), self._store.pool.figures.recordings
        recording = recordings.asked(number) if isinstance(number, int) else None
        if recording is None:
            return {"gone": True}  # it was made by another server: the client begins a new one
        used = recording.pop(BLOCKS_A_REPLY)
        if args.get("end") is True and used.is_all:
            recordings.end(number)
        return {
            "blocks": used.numbers.tolist(),
            "bytes": int(used.sizes_bytes.sum()),
            "lost": used.lost,
            "more": not used.is_all,
            **self._so_far(),
        }

    def _so_far(self) -> dict[str, Any]:
        """Return the time, and hits and misses since the server began."""
        pool = self._store.pool
        hits, misses = pool.figures.asked()
        return {
            "time": round(pool.age_clock.now_ns() / SECOND_NS, 3),
            "hits": hits,
            "misses": misses,
        }


def _key_of(args: dict[str, Any]) -> bytes:
    """Return the bytes of ``key``. Raises UsageError."""
    key = args.get("key")
    with contextlib.suppress(ValueError):
        if isinstance(key, str) and (found := bytes.fromhex(key)):
            return found
    raise UsageError("key: must be bytes in hex")
