"""The verbs evict, pin, unpin, verify and hottest of the control socket."""

import contextlib
import heapq
from typing import Any, Final

import trio

from kvfs.core.errors import CommandError, DeadInode, KvfsError, UsageError
from kvfs.core.types import InodeNo
from kvfs.engine.by_command import (
    EvictionOrder,
    PinProgress,
    Progress,
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
from kvfs.pool.rules.paths import path_of
from mount.control.arguments import named_by, number, texts
from mount.control.jobs import Jobs
from mount.control.socket import Verb

#: A reply is bounded (control_socket.REPLY_MAX_BYTES), and requests wait while it is made. One
#: character of a path may take six bytes of JSON.
_PINS_A_REPLY: Final = 1024
_LETTERS_A_REPLY: Final = 64 << 10
_BLOCKS_A_REPLY: Final = 256
#: Pins set for one request before others are answered; some 60 us each.
_PINS_A_TURN: Final = 32


class CommandVerbs:
    """The verbs of one mount; one eviction, or pinning by a pattern, at a time."""

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self._store = store
        self._jobs = Jobs(nursery)
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
        }

    async def _evict(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start a job: ``paths``, ``match``, ``bytes``, ``unused_for_s``, ``dry_run``."""
        order = EvictionOrder(
            self._named(args),
            number(args, "bytes", int),
            number(args, "unused_for_s", float),
            args.get("dry_run") is True,
        )
        if not order.dry_run:
            self._refuse_read_only()
        store, progress = self._store, Progress()
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
            for root in named(store.pool, store.namespace, what)
            for ino in ((STEP,) if root == STEP else files_below(store.pool, root))
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
        pool, after = self._store.pool, number(args, "after", int) or 0
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
        after, pool = number(args, "after", int) or 0, self._store.pool
        if after <= 0:
            self._hot = await trio.to_thread.run_sync(hottest, pool.rules.heat.columns())
            after = 0
        hot, blocks, letters = self._hot, list[tuple[str, int]](), 0
        for ino in hot[after : after + _BLOCKS_A_REPLY]:
            after += 1
            if (block := path_and_size(pool, ino)) is not None:
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
        what = named_by(args)
        pattern_of(what)
        return what

    def _found(self, args: dict[str, Any]) -> list[tuple[str, InodeNo]]:
        """Return all paths with their inodes; a missing one is an error before anything changes."""
        pool, namespace = self._store.pool, self._store.namespace
        return [(path, find(pool, namespace, path)) for path in texts(args, "paths")]
