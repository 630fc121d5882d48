"""Puts the index back to the newest moment that the device has: a copy, and the rows logged since.

That is a state of a second or so before the power loss. What came later is found by comparison
with the files (reconcile.py), so an older state is right as well, and the comparison just longer.
"""

import contextlib
import logging
import os
from typing import Final

from kvfs.core.errors import Damaged, FormatUnknown, IndexDamaged
from kvfs.core.log_records import Moment
from kvfs.core.pool_layout import DATA_NAME, INDEX_NEW
from kvfs.core.settings import Settings
from kvfs.storage.index import Index
from kvfs.storage.index_copy import found_copies, load_copy
from kvfs.storage.index_swap import index_path, remove_index, replace_index, settle_index
from kvfs.storage.index_transaction import Rows
from kvfs.storage.row_log import logged_batches, open_log
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Rows in one transaction: LMDB copies each changed leaf once for all of them.
_ROWS_AT_ONCE: Final = 1 << 16


def restore_index(pool_fd: int, settings: Settings, syscalls: Syscalls) -> Moment | None:
    """Replace the index by its newest copy with the rows logged since; return its moment.

    It is durable on return. None if there is no copy that is whole. Raises NoSpace, OSError.
    """
    settle_index(pool_fd, syscalls)
    log_fd = open_log(pool_fd, syscalls)
    if log_fd is None:
        return None
    try:
        for copied, name in sorted(found_copies(log_fd, syscalls), reverse=True):
            try:
                _load(pool_fd, log_fd, name, syscalls)
                moment = _replay(pool_fd, log_fd, copied, settings, syscalls)
            except (IndexDamaged, Damaged, FormatUnknown) as error:
                _log.warning("index: a copy of it cannot be used: %s", error)
                remove_index(INDEX_NEW, pool_fd, syscalls)
                continue
            replace_index(pool_fd, syscalls)
            return moment
    finally:
        syscalls.close(log_fd)
    return None


def _load(pool_fd: int, log_fd: int, name: str, syscalls: Syscalls) -> None:
    """Write the index of copy *name* to ``index.new``."""
    with contextlib.suppress(FileExistsError):
        syscalls.mkdir(INDEX_NEW, 0o700, dir_fd=pool_fd)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = syscalls.open(f"{INDEX_NEW}/{DATA_NAME}", flags, 0o600, dir_fd=pool_fd)
    try:
        load_copy(log_fd, name, fd, syscalls)
    finally:
        syscalls.close(fd)


def _replay(
    pool_fd: int, log_fd: int, copied: Moment, settings: Settings, syscalls: Syscalls
) -> Moment:
    """Enter the rows logged since *copied* into ``index.new``; return the moment of the last."""
    moment = copied
    with Index(
        index_path(pool_fd, INDEX_NEW),
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


def _enter(index: Index, rows: Rows) -> None:
    if index.preallocation_due():
        index.preallocate()
    with index.write() as txn:
        txn.put_rows(dict(sorted(rows.items())))
