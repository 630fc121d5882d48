"""The index of a mount that is taken over: clients have files open, and write some of them.

The last server was killed, or replaced. The page cache has every commit, the journal what waited
for one. So the index is trusted, and only what nobody has open any more is finished, as after a
kill.
"""

import contextlib
import logging
from collections.abc import Collection
from typing import Final, NamedTuple

from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo
from kvfs.devices import Device
from kvfs.engine.recovery.finish_drafts import finish_index
from kvfs.engine.recovery.rebuild import Progress
from kvfs.engine.recovery.recovery import Recovered, recover
from kvfs.engine.rewrite.awaited_opens import noted_awaited
from kvfs.pool.open.open_notes import Living, OpenNotes
from kvfs.storage.extents import Extents
from kvfs.storage.index_checkpoint import remove_checkpoint
from kvfs.storage.index_swap import open_index
from kvfs.storage.journal import Journal
from kvfs.storage.notes import Notes
from kvfs.storage.outliving import Outliving
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)


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
    """Make the index usable: for a take-over with *living* handles, else as recovery.py says.

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
    # Nothing protects the pages of the commit that it names any more.
    remove_checkpoint(device.pool_fd, syscalls)
    with (
        open_index(device.pool_fd, settings, syscalls, journal) as index,
        contextlib.closing(Extents(device.pool_fd, syscalls, device.fs_type)) as extents,
    ):
        done = journal.done()
        index.settle()
        finished = finish_index(index, extents, kept)
    _log.warning(
        "%s: taken over; %d drafts that nobody has open dropped, %d rewritten blocks measured",
        device.source,
        finished.dropped,
        finished.measured,
    )
    return done
