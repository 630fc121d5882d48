"""The verbs of `kvfs drive` on the control socket: what of a pool's drives changes while it serves.

One change at a time. A drive that is to be drained is told so first, in a thread, and counts then.
One that is removed is so as soon as a header says it; the next server takes over without it.

A drive that is added was made by the command, with the longer list of drives in its header. Then
the order is: the supervisor holds it; a note tells the next server of it; the headers of the others
have the longer list; the next server takes over, and it alone puts blocks there. If that ends after
any of these, the next server or the next start goes on with the longest list that it finds.
"""

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import trio

from kvfs.core.drives import DRIVES_MAX, SERIAL_END
from kvfs.core.encryption import Encryption, encryption_like, parse_encryption
from kvfs.core.errors import CommandError, ServeFailed, UsageError
from kvfs.devices import Device, DirectoryReserve, open_one_more
from kvfs.devices.pool_drives import (
    SERVED_DRIVES_MAX,
    bring_up_to_date,
    in_order,
    note_removed,
)
from kvfs.devices.pool_files import one_more_header
from kvfs.engine.eviction.drains import number_of
from kvfs.engine.store import Store
from kvfs.machine.held_files import HeldFiles
from kvfs.pool.space.drive import PoolDrive
from mount.control.socket import Verb
from mount.process.succession import Succession, leave_one_more

#: Has another server take over; returns only by an error.
Replace = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class DriveVerbs:
    """The verbs of one mount."""

    def __init__(self, store: Store, held: HeldFiles, of: Succession, replace: Replace) -> None:
        """*of* is what *held* outlives this server with; *replace* is the verb ``upgrade``."""
        self._store: Final = store
        self._held: Final = held
        self._of: Final = of
        self._replace: Final = replace
        self._one: Final = trio.Lock()
        #: One that was added, and that the next server serves.
        self._added: Device | None = None

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {
            "drive-drain": self._drain,
            "drive-plan": self._plan,
            "drive-add": self._add,
            "drive-remove": self._remove,
        }

    async def _drain(self, args: dict[str, Any]) -> dict[str, Any]:
        """Empty ``drive``, or with ``undo`` let it take blocks again; return what it holds.

        Raises UsageError, DriveNeeded, ServeFailed.
        """
        drains, draining = self._store.drains, args.get("undo") is not True
        self._refuse_read_only()
        async with self._one:
            drive = drains.drive(number_of(args.get("drive")))
            if draining:
                drains.require_spared(drive)
            if drive.is_draining != draining:
                await self._write_draining(drive, draining=draining)
        left = drains.left(drive)
        return {
            "drive": drive.number,
            "state": drive.state.value,
            "blocks": left.blocks,
            "used_bytes": left.used_bytes,
        }

    async def _write_draining(self, drive: PoolDrive, *, draining: bool) -> None:
        """Have *drive* drained, or not any more. Raises ServeFailed."""
        drains = self._store.drains
        write = functools.partial(drains.write, drive, draining=draining)
        with _header_errors(drive):
            drains.learn(drive, await trio.to_thread.run_sync(write))

    async def _remove(self, args: dict[str, Any]) -> dict[str, Any]:
        """Remove ``drive``, if it is empty or ``now``, and have the next server take over.

        Returns only if that fails: then ``why`` says so, and the drive is removed all the same.
        Raises UsageError, DriveNeeded, ServeFailed, with nothing changed but that it drains.
        """
        drains = self._store.drains
        self._refuse_read_only()
        async with self._one:
            self._require_follower()
            drive = drains.drive(number_of(args.get("drive")))
            drains.require_removable(drive, now=args.get("now") is True)
            if not (drive.is_draining or drive.has_failed):
                await self._write_draining(drive, draining=True)
            pool = self._store.pool
            gone, device = pool.device.drives[drive.number], pool.device
            others = [each for each in pool.space.serving if each is not drive]
            told = [device.drives[each.number] for each in others if not each.probe.is_silent]
            with _header_errors(drive):
                await trio.to_thread.run_sync(note_removed, told, gone)
            try:
                await self._replace(args)
            except CommandError as error:
                why = f"drive {drive.number} is removed, and the next server goes without: {error}"
                return {"why": why}
        raise ServeFailed("the server that was to take over did not")

    async def _plan(self, _args: dict[str, Any]) -> dict[str, Any]:
        """Return the header of a drive that may be added, and how it is to be encrypted.

        And the sources of those that are there. Raises UsageError, ServeFailed, KeyUnusable.
        """
        self._require_room()
        device = self._store.pool.device
        header = one_more_header(device.header)
        several = header.membership._asdict()
        header_fields = header._asdict() | {"several": several}
        there = [drive for drive in device.drives if not drive.why_missing]
        encryption = encryption_like((one.encrypted_by for one in there), self._encryption())
        return {
            "header": header_fields,
            "sources": [one.source for one in there],
            "encryption": encryption.text if encryption is not None else "",
        }

    def _encryption(self) -> Encryption | None:
        """Return how the pool's drives are opened, as the mount was told."""
        return parse_encryption(self._store.pool.settings.encrypt)

    async def _add(self, args: dict[str, Any]) -> dict[str, Any]:
        """Add the drive ``source``, which is made already, and have the next server take over.

        Returns only if that fails: then ``why`` says so, and the drive is added all the same.
        Raises CommandError, with nothing changed.
        """
        source = args.get("source")
        if not isinstance(source, str):
            raise UsageError("source: must be a text")
        async with self._one:
            self._require_room()
            self._added = await trio.to_thread.run_sync(self._open, source)
            device = self._store.pool.device
            try:
                leave_one_more(self._held, self._of.notes, device, self._added)
            except ServeFailed:
                self._added.close()
                self._added = None
                raise
            try:
                await trio.to_thread.run_sync(bring_up_to_date, device)
                await self._replace(args)
            except CommandError as error:
                why = f"drive {len(device.drives)} is added, and the next server serves it: {error}"
                return {"why": why}
        raise ServeFailed("the server that was to take over did not")

    def _open(self, source: str) -> Device:
        """Return the drive *source*, the next of this pool; in any thread. Raises CommandError."""
        settings, device = self._store.pool.settings, self._store.pool.device
        reserve = DirectoryReserve(
            settings.directory_reserve_share, settings.directory_reserve_bytes
        )
        more = open_one_more(source, reserve=reserve, encryption=self._encryption())
        try:
            if more.header.membership.drive != len(device.drives):
                raise UsageError(f"{source} is not the next drive of this pool")
            in_order([*device.drives, more])
        except BaseException:
            more.close()
            raise
        return more

    def _require_room(self) -> None:
        """Raise UsageError or ServeFailed unless one more drive can be added now."""
        self._refuse_read_only()
        self._require_follower()
        pool = self._store.pool
        if sum(not drive.is_removed for drive in pool.space.drives.all) >= SERVED_DRIVES_MAX:
            raise UsageError(f"a pool has at most {SERVED_DRIVES_MAX} drives")
        if len(pool.device.drives) >= DRIVES_MAX:
            raise UsageError(
                f"a pool has had {DRIVES_MAX} drives, with those that were removed: make a new one"
            )
        if not pool.device.more and pool.numbers.next >= SERIAL_END:
            raise UsageError(
                "this pool has given out too many inode numbers to have a second drive: make a "
                "new one of both"
            )

    def _require_follower(self) -> None:
        """Raise ServeFailed unless another server can take over, with the drives of this one."""
        if not self._of.may_be_followed:
            raise ServeFailed("no server can take over this mount: unmount it first")
        if self._added is not None:
            raise ServeFailed("a drive was added that is not served yet: `kvfs upgrade` first")

    def _refuse_read_only(self) -> None:
        if self._store.pool.settings.read_only:
            raise UsageError("the mount is read-only")


@contextlib.contextmanager
def _header_errors(drive: PoolDrive) -> Iterator[None]:
    """Turn an OSError of writing headers into ServeFailed."""
    try:
        yield
    except OSError as error:
        raise ServeFailed(
            f"drive {drive.number}: its header cannot be written: {error.strerror}"
        ) from error
