"""Puts the index back to the newest moment that the device has: a copy, and the rows logged since.

That is a state of a second or so before the power loss. What came later is found by comparison
with the files (reconcile.py), so an older state is right as well, and the comparison just longer.
"""

import logging
import os
from typing import Final, NamedTuple

from kvfs.core.errors import NO_SPACE, Damaged, FormatUnknown, IndexDamaged, NoSpace
from kvfs.core.log_records import Moment
from kvfs.core.pool_layout import DATA_NAME
from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo
from kvfs.storage.index import Index
from kvfs.storage.index_copy import HeldIndex, found_copies, load_copy, write_copy
from kvfs.storage.index_place import IndexPlace, pool_index
from kvfs.storage.index_transaction import Rows
from kvfs.storage.lmdb_file import open_environment
from kvfs.storage.row_log import forget_log, logged_batches, open_log
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Rows in one transaction: LMDB copies each changed leaf once for all of them.
_ROWS_AT_ONCE: Final = 1 << 16
#: The number of a pool's first copy.
_FIRST: Final = 1


class Restored(NamedTuple):
    """An index that was put back: its path, and its moment."""

    path: str
    moment: Moment


def restore_index(
    pool_fd: int, place: IndexPlace, settings: Settings, syscalls: Syscalls
) -> Restored | None:
    """Make an index in *place* from the newest copy and the rows logged since.

    In the pool it is durable on return. None if no copy is whole. Raises NoSpace, OSError.
    """
    log_fd = open_log(pool_fd, syscalls)
    if log_fd is None:
        return None
    try:
        for copied, name, _ in sorted(found_copies(log_fd, syscalls), reverse=True):
            try:
                with place.building() as path:
                    _load(log_fd, name, path, syscalls)
                    moment = _replay(log_fd, copied, path, settings, syscalls)
            except (IndexDamaged, Damaged, FormatUnknown) as error:
                _log.warning("index: a copy of it cannot be used: %s", error)
            else:
                return Restored(place.finish(path), moment)
    finally:
        syscalls.close(log_fd)
    return None


def _load(log_fd: int, name: str, path: str, syscalls: Syscalls) -> None:
    """Write the index of copy *name* to the directory *path*."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = syscalls.open(f"{path}/{DATA_NAME}", flags, 0o600)
    try:
        load_copy(log_fd, name, fd, syscalls)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoSpace(f"index: no room for it at {path}") from error
        raise
    finally:
        syscalls.close(fd)


def _replay(
    log_fd: int, copied: Moment, path: str, settings: Settings, syscalls: Syscalls
) -> Moment:
    """Enter the rows logged since *copied* into the index at *path*; return the last's moment."""
    moment = copied
    with Index(
        path,
        map_size_bytes=2 * settings.index_map_bytes,
        preallocate_bytes=settings.index_preallocate_bytes,
        syscalls=syscalls,
    ) as index:
        rows: Rows = {}
        for batch in logged_batches(log_fd, syscalls, copied.number):
            rows.update(batch.rows)
            moment = batch.moment
            if len(rows) >= _ROWS_AT_ONCE:
                _enter(index, rows)
                rows = {}
        _enter(index, rows)
        index.sync()
    _log.info("index: batches %d to %d of its log entered", copied.number, moment.number)
    return moment


def begin_log(pool_fd: int, held: HeldIndex, young: InodeNo, syscalls: Syscalls) -> int:
    """Begin the log anew with a copy of the index that is *held*; return the number of the copy.

    All inodes have numbers below *young*. Durable on return. Raises Damaged, OSError.
    """
    forget_log(pool_fd, syscalls)
    log_fd = open_log(pool_fd, syscalls, create=True)
    assert log_fd is not None
    try:
        write_copy(log_fd, syscalls, held, Moment(_FIRST, young, ()), paced=False)
    finally:
        syscalls.close(log_fd)
    return _FIRST


def convert_index(pool_fd: int, map_size_bytes: int, young: InodeNo, syscalls: Syscalls) -> int:
    """Begin the log with the sound index in the pool, where an earlier version had it, or mkfs.

    Nobody has it open. Returns and raises what ``begin_log`` does; ToolMissing, IndexDamaged.
    """
    env = open_environment(pool_index(pool_fd), map_size_bytes, read_only=True)
    try:
        held = HeldIndex(env)
        try:
            return begin_log(pool_fd, held, young, syscalls)
        finally:
            held.end()
    finally:
        env.close()


def _enter(index: Index, rows: Rows) -> None:
    if index.preallocation_due():
        index.preallocate()
    with index.write() as txn:
        txn.enter_logged(dict(sorted(rows.items())))
