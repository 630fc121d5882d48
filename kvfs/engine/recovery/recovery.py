"""Make a pool's index usable, whatever happened to it.

Three cases (docs/durability.md). After a clean stop the index is trusted. After an unclean one in
the same boot the page cache has every commit, and what was left open is finished. After another
boot, or if the file system was cut off, the unsynced index may be in any state: it goes back to the
last moment that was logged (restore.py), and is compared with the files (reconcile.py); without a
log it is rebuilt from them.

A mount that is taken over is another case: the last server was killed, or replaced, and clients
have files open, and write some of them. The page cache has every commit, the journal what waited
for one. So the index is trusted, and only what nobody has open any more is finished, as after a
kill.
"""

import contextlib
import logging
import random
import stat
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged, FormatUnknown, IndexDamaged, NoSpace, SourceFull
from kvfs.core.log_records import Moment
from kvfs.core.pool_layout import CHECKPOINT
from kvfs.core.records import INODE_PREFIX, inode_key
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import Device
from kvfs.engine.recovery.finish_drafts import finish_index
from kvfs.engine.recovery.index_before_use import (
    INODE_ROWS,
    compact_index,
    refuse_broken,
    refuse_unreadable,
)
from kvfs.engine.recovery.rebuild import Progress, rebuild_index, skip_numbers
from kvfs.engine.recovery.restore import restore_index
from kvfs.engine.rewrite.awaited_opens import noted_awaited
from kvfs.pool.open.open_notes import Living, OpenNotes
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.index_swap import index_path, open_index, settle_index
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.journal import Journal
from kvfs.storage.outliving import Notes, Outliving
from kvfs.storage.run_state import read_run_state
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: A copy of a pool skips a random count of inode numbers, of so many bits; there are 2**64.
_COPIES_APART_BITS: Final = 40


class Recovered(NamedTuple):
    """What is left to do: a sweep of stray files; a comparison, if the index went back.

    ``unlisted``: some blocks may not be durable, and only a search of the index tells which. Not
    so if the index went back or was rebuilt: then all that is left is on the device.
    """

    sweep_due: bool
    gone_back: Moment | None = None
    unlisted: bool = False


def recover(
    device: Device, settings: Settings, syscalls: Syscalls, progress: Progress | None = None
) -> Recovered:
    """Make the index usable; return what is left to do while requests are served.

    If the index should be sound and is not, the device stays untouched. Raises IndexDamaged,
    FormatUnknown, SourceFull, OSError.
    """
    state = read_run_state(device.pool_fd, syscalls, device.superblock)
    with _errors_named(device):
        if settings.read_only:
            if not state.clean:
                raise IndexDamaged("not stopped cleanly, so mount it writable once")
            _look(device, settings, syscalls)
            return Recovered(sweep_due=False)
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(CHECKPOINT, dir_fd=device.pool_fd)
        gone_back: Moment | None = None
        if state.trusted:
            listed = _look(device, settings, syscalls)
            if not state.clean and not listed:
                refuse_unreadable(device.pool_fd, INODE_ROWS)
            settle_index(device.pool_fd, syscalls)
            if not state.clean:
                _finish(device, settings, syscalls)
            compact_index(device.pool_fd, syscalls)
        elif (gone_back := _go_back(device, settings, syscalls)) is None:
            _log.warning("%s: cut off before it could stop; its index is rebuilt", device.source)
            _rebuild(device, settings, syscalls, progress)
        if state.moved:
            _part_numbers(device, syscalls)
    sweep_due = state.strays or not state.clean
    return Recovered(sweep_due, gone_back, unlisted=sweep_due and state.trusted)


def _go_back(device: Device, settings: Settings, syscalls: Syscalls) -> Moment | None:
    """Put the index back to the last moment that was logged; None if there is no such."""
    try:
        moment = restore_index(device.pool_fd, settings, syscalls)
        if moment is not None:
            _look(device, settings, syscalls)
    except (IndexDamaged, Damaged, FormatUnknown) as error:
        _log.warning("%s: its log cannot be used: %s", device.source, error)
        return None
    return moment


def _look(device: Device, settings: Settings, syscalls: Syscalls) -> bool:
    """Raise unless the index can be opened and has its root; nothing is written.

    Return whether it has a list of what is unfinished.
    """
    numbers = InodeNumbers(device.pool_fd, syscalls, read_only=True)
    numbers.close()
    refuse_broken(device.pool_fd)
    path = index_path(device.pool_fd)
    with Index(
        path, map_size_bytes=settings.index_map_bytes, read_only=True, syscalls=syscalls
    ) as index:
        index.counters()
        root = index.inode(ROOT_INODE)
        if root is None or not stat.S_ISDIR(root.mode):
            raise IndexDamaged("index: it has no root directory")
        # Then INODES is another pool's, or older than the index: its next numbers are in use.
        last = inode_key(InodeNo(numbers.first - 1))
        if any(index.walk(INODE_PREFIX, 1, after=last)):
            raise IndexDamaged(f"INODES: not behind {numbers.first:#x}, which the index knows")
        return index.unfinished() is not None


def _finish(device: Device, settings: Settings, syscalls: Syscalls) -> None:
    with (
        Index(
            index_path(device.pool_fd),
            map_size_bytes=settings.index_map_bytes,
            preallocate_bytes=settings.index_preallocate_bytes,
            syscalls=syscalls,
        ) as index,
        contextlib.closing(Extents(device.pool_fd, syscalls, device.fs_type)) as extents,
    ):
        finished = finish_index(index, extents)
    _log.warning(
        "%s: not stopped cleanly; %d drafts dropped, %d rewritten blocks measured",
        device.source,
        finished.dropped,
        finished.measured,
    )


def _rebuild(
    device: Device, settings: Settings, syscalls: Syscalls, progress: Progress | None
) -> None:
    with contextlib.closing(Extents(device.pool_fd, syscalls, device.fs_type)) as extents:
        rebuild_index(device.pool_fd, extents, settings, syscalls, progress)


def _part_numbers(device: Device, syscalls: Syscalls) -> None:
    """Skip inode numbers, so that the original and its copies give different ones to new blocks.

    All have the same epoch, so only the number tells the NFS handles of these blocks apart.
    """
    with contextlib.closing(InodeNumbers(device.pool_fd, syscalls, read_only=True)) as numbers:
        first = numbers.first
    skip_numbers(InodeNo(first + random.getrandbits(_COPIES_APART_BITS)), device.pool_fd, syscalls)
    _log.info("%s: a copy of another directory's pool; it numbers its blocks apart", device.source)


@contextlib.contextmanager
def _errors_named(device: Device) -> Iterator[None]:
    """Add the pool's source to errors, and what the operator can do."""
    try:
        yield
    except (IndexDamaged, Damaged) as error:
        hint = f"kvfs fsck --repair {device.source} rebuilds it"
        raise IndexDamaged(f"{device.source}: {error}; {hint}") from error
    except FormatUnknown as error:
        raise FormatUnknown(f"{device.source}: {error}") from error
    except NoSpace as error:
        raise SourceFull(f"{device.source}: no room for the index: {error}") from error


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
        if living is None:
            return Begun(recover(device, settings, syscalls, progress), set(), {})
        kept = _unfinished(living, outliving.notes)
        done = _take_over(device, settings, syscalls, outliving.journal, kept)
        return Begun(Recovered(sweep_due=not settings.read_only), kept, done)
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
    kept: Collection[InodeNo],
) -> dict[int, InodeNo]:
    """Commit what waits in *journal*, and finish what is open and not among *kept*.

    Raises IndexDamaged, FormatUnknown, NoSpace, Damaged, OSError.
    """
    if settings.read_only:
        return {}
    with (
        open_index(device.pool_fd, settings, syscalls, journal) as index,
        contextlib.closing(Extents(device.pool_fd, syscalls, device.fs_type)) as extents,
    ):
        done = journal.done()
        index.settle()
        finished = finish_index(index, extents, kept, takes_over=True)
    _log.warning(
        "%s: taken over; %d drafts that nobody has open dropped, %d rewritten blocks measured",
        device.source,
        finished.dropped,
        finished.measured,
    )
    return done
