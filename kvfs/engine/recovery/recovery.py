"""Make a pool's index usable, whatever happened to it.

Three cases (docs/durability.md). After a clean stop the index is trusted. After an unclean one in
the same boot the page cache has every commit, and what was left open is finished. After another
boot, or if the file system was cut off, the unsynced index may be in any state: it goes back to the
last moment that was logged (index_before_use.py), and is compared with the files (reconcile.py);
without a log it is rebuilt from them.

A mount that is taken over is another case: the last server was killed, or replaced, and clients
have files open, and write some of them. The page cache has every commit, the journal what waited
for one. So the index is trusted, and only what nobody has open any more is finished, as after a
kill.
"""

import contextlib
import logging
import random
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

from kvfs.core.errors import Damaged, FormatUnknown, IndexDamaged, NoSpace, SourceFull
from kvfs.core.log_records import Moment
from kvfs.core.pool_layout import CHECKPOINT, DATA_NAME
from kvfs.core.records import INODE_PREFIX, inode_key, parse_inodes
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import Device
from kvfs.engine.recovery.finish_drafts import finish_index
from kvfs.engine.recovery.index_before_use import (
    INODE_ROWS,
    Restored,
    compact_index,
    convert_index,
    refuse_broken,
    refuse_unreadable,
    restore_index,
)
from kvfs.engine.recovery.rebuild import Progress, rebuild_index, skip_numbers
from kvfs.engine.rewrite.awaited_opens import noted_awaited
from kvfs.pool.open.open_notes import Living, OpenNotes
from kvfs.storage.drive_rows import read_drive_counts
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.index_place import (
    IN_POOL,
    IndexAt,
    IndexPlace,
    is_used,
    open_index,
    present_index,
    settle_index,
)
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.journal import Journal
from kvfs.storage.memory_files import MemoryFiles
from kvfs.storage.outliving import Notes, Outliving
from kvfs.storage.pool_run import latest_places, read_pool_run, stale_drives
from kvfs.storage.run_state import RunState
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

T = TypeVar("T")

#: A copy of a pool skips a random count of inode numbers, of so many bits; there are 2**64.
_COPIES_APART_BITS: Final = 40


class Recovered(NamedTuple):
    """Where the index is, and what is left to do: a sweep of strays; a comparison, if it went back.

    ``logged``: the batch of the log that leads to the index as it is; 0: none does.

    ``unlisted``: some blocks may not be durable, and only a search of the index tells which. Not
    so if the index went back or was rebuilt: then all that is left is on the device.
    """

    path: str
    sweep_due: bool
    logged: int = 0
    gone_back: Moment | None = None
    unlisted: bool = False

    @property
    def at(self) -> IndexAt:
        """Where the index is."""
        return IndexAt(self.path, self.logged)


def recover(
    device: Device, settings: Settings, syscalls: Syscalls, progress: Progress | None = None
) -> Recovered:
    """Make the index usable; return what is left to do while requests are served.

    If the index should be sound and is not, the device stays untouched. Raises IndexDamaged,
    FormatUnknown, SourceFull, OSError.
    """
    state = read_pool_run(device.run_places, syscalls)
    if settings.read_only and not state.clean:
        with _errors_named(device):
            raise IndexDamaged("not stopped cleanly, so mount it writable once")
    with _errors_named(device):
        place = _place_of(device, settings, syscalls)
        said = state.index_dir
        present = present_index(device.home.pool_fd, said) if state.trusted else None
        if present is not None and not (said and is_used(said)):
            found = _found(device, settings, syscalls, state, place, present)
        else:
            found = _made(device, settings, syscalls, state, place, progress)
        place.discard_others(found.path)
        if state.moved:
            _part_numbers(device, syscalls)
    return found


def _place_of(
    device: Device, settings: Settings, syscalls: Syscalls, *, in_pool: bool | None = None
) -> IndexPlace:
    if in_pool is None:
        in_pool = settings.index_place == IN_POOL and not settings.read_only
    return IndexPlace(device.index_places, settings, syscalls, in_pool=in_pool)


def _found(
    device: Device,
    settings: Settings,
    syscalls: Syscalls,
    state: RunState,
    place: IndexPlace,
    present: str,
) -> Recovered:
    """Use the index that the last server left at *present*, in memory or in the pool."""
    listed = _require_sound(device, settings, syscalls, present)
    if settings.read_only:
        return Recovered(present, sweep_due=False)
    if not state.clean:
        if not listed:
            refuse_unreadable(present, INODE_ROWS)
        if not state.index_dir:
            settle_index(device.home.pool_fd, syscalls)
        elif device.lacking:
            present = place.move(present)  # a drive that is away names it where it was
        _finish(device, settings, syscalls, present)
        if not state.index_dir:
            compact_index(device.home.pool_fd, syscalls)
        return Recovered(present, sweep_due=True, unlisted=True)
    settle_index(device.home.pool_fd, syscalls)
    if place.in_pool:
        compact_index(device.home.pool_fd, syscalls)
        return Recovered(present, state.strays, state.logged, unlisted=state.strays)
    logged = state.logged or _convert(device, settings, syscalls)
    loaded = _loaded(device, settings, syscalls, state._replace(logged=logged), place)
    if loaded is None:
        raise IndexDamaged("index: no copy of it is whole")
    return loaded


def _convert(device: Device, settings: Settings, syscalls: Syscalls) -> int:
    with contextlib.closing(InodeNumbers(device.pool_fds, syscalls, read_only=True)) as numbers:
        young = numbers.first
    there = [one.pool_fd for one in device.there]
    return convert_index(there, settings.index_map_bytes, young, syscalls)


def _made(
    device: Device,
    settings: Settings,
    syscalls: Syscalls,
    state: RunState,
    place: IndexPlace,
    progress: Progress | None,
) -> Recovered:
    """Make the index from what the device has of it: its log, or the identities."""
    if not settings.read_only:
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(CHECKPOINT, dir_fd=device.home.pool_fd)
    # What a drive had that is missing now, nobody had to keep twice.
    is_whole = not device.lacking or settings.read_only
    if state.clean:
        loaded = _loaded(device, settings, syscalls, state, place)
        if loaded is not None:
            return loaded
        if is_whole:
            raise IndexDamaged("index: no copy of it is whole")
    elif state.trusted and not state.index_dir and is_whole:
        raise IndexDamaged(f"index: {DATA_NAME} is missing")
    try:
        restored = _restored(device, settings, syscalls, place)
    except (IndexDamaged, Damaged, FormatUnknown) as error:
        _log.warning("%s: its log cannot be used: %s", device.home.source, error)
        restored = None
    if restored is not None:
        return Recovered(restored.path, sweep_due=True, gone_back=restored.moment)
    why = "no drive that is there has its index" if state.clean else "cut off before it could stop"
    _log.warning("%s: %s; its index is rebuilt", device.home.source, why)

    def rebuild(place: IndexPlace) -> str:
        with contextlib.closing(Extents(device.pool_fds, syscalls, device.fs_type)) as extents:
            stale = stale_drives(device.run_places, syscalls)
            made = (device.pool_fds, place, extents, settings, syscalls, progress)
            return rebuild_index(*made, stale=stale)

    return Recovered(_in_memory_or_pool(device, settings, syscalls, place, rebuild), sweep_due=True)


def _loaded(
    device: Device, settings: Settings, syscalls: Syscalls, state: RunState, place: IndexPlace
) -> Recovered | None:
    """Load the index of a clean stop from its log; None if no copy is whole."""
    restored = _restored(device, settings, syscalls, place)
    if restored is None:
        return None
    path, moment = restored
    if moment.number == state.logged:
        return Recovered(path, state.strays, state.logged, unlisted=state.strays)
    if settings.read_only:
        place.discard(path)
        raise IndexDamaged("index: a part of its log is missing")
    _log.error(
        "%s: a part of the index's log is missing; what it had is compared", device.home.source
    )
    return Recovered(path, sweep_due=True, gone_back=moment)


def _restored(
    device: Device, settings: Settings, syscalls: Syscalls, place: IndexPlace
) -> Restored | None:
    """Put the index back to the last moment that was logged; None if there is no such.

    Raises IndexDamaged, Damaged, FormatUnknown, NoSpace, OSError.
    """

    def restore(place: IndexPlace) -> Restored | None:
        # A drive that was away has a log of then, which may seem to lead further.
        latest = [one.pool_fd for one in latest_places(device.run_places, syscalls)]
        return restore_index(latest, place, settings, syscalls)

    restored = _in_memory_or_pool(device, settings, syscalls, place, restore)
    if restored is not None:
        try:
            _require_sound(device, settings, syscalls, restored.path)
        except BaseException:  # an interrupt, too: the next start makes it anew
            place.discard(restored.path)
            raise
    return restored


def _in_memory_or_pool(
    device: Device,
    settings: Settings,
    syscalls: Syscalls,
    place: IndexPlace,
    make: Callable[[IndexPlace], T],
) -> T:
    """Return what *make* makes in *place*; if memory has no room for it, in the pool."""
    try:
        return make(place)
    except (NoSpace, OSError) as error:
        if place.in_pool or settings.read_only:
            raise
        _log.warning("index: not in memory (%s), but in the pool", error)
        return make(_place_of(device, settings, syscalls, in_pool=True))


def _require_sound(device: Device, settings: Settings, syscalls: Syscalls, path: str) -> bool:
    """Raise unless the index at *path* can be opened and has its root; nothing is written.

    Return whether it has a list of what is unfinished.
    """
    numbers = InodeNumbers(device.pool_fds, syscalls, read_only=True)
    numbers.close()
    refuse_broken(path)
    with Index(
        path, map_size_bytes=settings.index_map_bytes, read_only=True, syscalls=syscalls
    ) as index:
        index.counters()
        read_drive_counts(index, len(device.pool_fds))
        root = index.inode(ROOT_INODE)
        if root is None or not stat.S_ISDIR(root.mode):
            raise IndexDamaged("index: it has no root directory")
        # Then INODES is another pool's, or older than the index: its next numbers are in use.
        # Not those of a drive that is missing: its own INODES tells of them.
        missing = {one.header.drive for one in device.missing}
        ends = enumerate(numbers.with_serial(numbers.first))
        for end in (end for drive, end in ends if drive not in missing):
            rows = next(index.walk(INODE_PREFIX, 1, after=inode_key(InodeNo(end - 1))), [])
            if any(numbers.is_new(ino) for ino, _ in parse_inodes(rows)):
                raise IndexDamaged(f"INODES: not behind {numbers.first:#x}, which the index knows")
        return index.unfinished() is not None


def _finish(device: Device, settings: Settings, syscalls: Syscalls, path: str) -> None:
    with (
        open_index(path, settings, syscalls) as index,
        contextlib.closing(_all_extents(device, syscalls, path)) as extents,
    ):
        finished = finish_index(index, extents)
    _log.warning(
        "%s: not stopped cleanly; %d drafts dropped, %d rewritten blocks measured",
        device.home.source,
        finished.dropped,
        finished.measured,
    )


def _all_extents(device: Device, syscalls: Syscalls, path: str) -> Extents:
    """Return the extents on the drives, and those in memory beside the index at *path*."""
    memory = MemoryFiles.found(IndexAt(path, 0).in_memory, len(device.pool_fds), syscalls)
    return Extents(device.pool_fds, syscalls, device.fs_type, memory)


def _part_numbers(device: Device, syscalls: Syscalls) -> None:
    """Skip inode numbers, so that the original and its copies give different ones to new blocks.

    All have the same epoch, so only the number tells the NFS handles of these blocks apart.
    """
    with contextlib.closing(InodeNumbers(device.pool_fds, syscalls, read_only=True)) as numbers:
        first = numbers.first
    apart = InodeNo(first + random.getrandbits(_COPIES_APART_BITS))
    skip_numbers(apart, device.pool_fds, syscalls)
    _log.info(
        "%s: a copy of another directory's pool; it numbers its blocks apart", device.home.source
    )


@contextlib.contextmanager
def _errors_named(device: Device) -> Iterator[None]:
    """Add the pool's source to errors, and what the operator can do."""
    try:
        yield
    except (IndexDamaged, Damaged) as error:
        hint = f"kvfs fsck --repair {device.home.source} rebuilds it"
        raise IndexDamaged(f"{device.home.source}: {error}; {hint}") from error
    except FormatUnknown as error:
        raise FormatUnknown(f"{device.home.source}: {error}") from error
    except NoSpace as error:
        raise SourceFull(f"{device.home.source}: no room for the index: {error}") from error


class Begun(NamedTuple):
    """An index that can be used.

    ``kept`` are the unfinished inodes, ``done`` the requests that the last server carried out but
    may not have answered, with the inode of each.
    """

    recovered: Recovered
    kept: set[InodeNo]
    done: dict[int, InodeNo]


def begin(
    device: Device,
    settings: Settings,
    syscalls: Syscalls,
    progress: Progress | None,
    outliving: Outliving,
    living: Living | None,
) -> Begun:
    """Make the index usable: for a take-over with *living* handles, else by ``recover``.

    *outliving* is closed if that fails. Raises what ``recover`` and ``_take_over`` raise.
    """
    try:
        if living is None or settings.read_only:
            return Begun(recover(device, settings, syscalls, progress), set(), {})
        kept = _unfinished(living, outliving.notes)
        return _take_over(device, settings, syscalls, outliving.journal, kept)
    except BaseException:
        outliving.close()
        raise


def _unfinished(living: Living, notes: Notes) -> set[InodeNo]:
    """Return the inodes that somebody writes, or will be the first to write."""
    closes = {ino for ino, _ in OpenNotes(notes).all_closes()}
    return living.written() | closes | {ino for ino, *_ in noted_awaited(notes)}


def _take_over(
    device: Device,
    settings: Settings,
    syscalls: Syscalls,
    journal: Journal,
    kept: set[InodeNo],
) -> Begun:
    """Commit what waits in *journal*, and finish what is open and not among *kept*.

    Raises IndexDamaged, FormatUnknown, NoSpace, Damaged, OSError.
    """
    said = read_pool_run(device.run_places, syscalls).index_dir
    path = present_index(device.home.pool_fd, said)
    if path is None:
        with _errors_named(device):
            raise IndexDamaged("index: the last server's is gone")
    with (
        open_index(path, settings, syscalls, journal) as index,
        contextlib.closing(_all_extents(device, syscalls, path)) as extents,
    ):
        done = journal.done()
        index.settle()
        finished = finish_index(index, extents, kept, takes_over=True)
    _log.warning(
        "%s: taken over; %d drafts that nobody has open dropped, %d rewritten blocks measured",
        device.home.source,
        finished.dropped,
        finished.measured,
    )
    return Begun(Recovered(path, sweep_due=True), kept, done)
