"""An index before a start uses it: it is put back, read in a process of its own, and compacted.

It is put back to the newest moment that the device has: a copy, and the rows logged since. That is
a state of a second or so before the power loss. What came later is found by comparison with the
files (reconcile.py), so an older state is right as well, and the comparison just longer.

Some damage makes LMDB end its process by SIGABRT or SIGBUS. Whatever opens a pool must survive to
report it.

LMDB reuses free pages but never makes its file smaller, so blocks could never use the space of
removed names. So an index that was larger is copied to ``index.new`` if that pays, and the copy is
complete and durable before one rename puts it in the place of the old one. After a kill there is
one of the two, and the next start removes ``index.new``.
"""

import contextlib
import faulthandler
import logging
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, NoReturn

import lmdb

from kvfs.core.errors import (
    NO_SPACE,
    CommandError,
    Damaged,
    FormatUnknown,
    IndexDamaged,
    NoSpace,
    ToolMissing,
)
from kvfs.core.log_records import Moment
from kvfs.core.pool_layout import DATA_NAME, INDEX, INDEX_NEW
from kvfs.core.records import INODE_PREFIX, META_PREFIX
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.index import Index
from kvfs.storage.index_pages import refuse_broken_pages
from kvfs.storage.index_place import IndexPlace, pool_index, remove_index
from kvfs.storage.index_transaction import Rows
from kvfs.storage.lmdb_file import (
    SPARE_PAGES,
    check_data_file,
    open_environment,
    raise_index_error,
    rows_bytes,
    verify_data_file,
)
from kvfs.storage.row_log import (
    HeldIndex,
    forget_log,
    found_copies,
    last_logged,
    load_copy,
    logged_batches,
    open_log,
    write_copy,
)
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: The rows of all keyspaces; those that a start reads; those that finish_drafts.py reads.
ALL_ROWS: Final = (b"",)
START_ROWS: Final = (META_PREFIX,)
INODE_ROWS: Final = (META_PREFIX, INODE_PREFIX)

#: An index up to this size is looked at whole, in some 0.1 s: every page, and every row.
WHOLE_LOOK_MOST_BYTES: Final = 8 << 20

#: Of a larger one up to this size (some 500,000 blocks) all pages are looked at, in half a second.
BOUNDS_LOOK_MOST_BYTES: Final = 256 << 20

_STEP_ROWS: Final = 4096
#: Each row takes more than this: 8 bytes of its own, 2 of its page's table, and the key.
_ROW_LEAST_BYTES: Final = 10
_TEXT_MAX_BYTES: Final = 4096
#: A smaller gain is not worth a copy: more than this is preallocated anyway.
_GAIN_LEAST_BYTES: Final = 16 << 20
#: Nor is a smaller share of the file, which new names will fill.
_GAIN_LEAST_SHARE: Final = 1 / 2
#: More is not copied: a start waits for the copy, some seconds for this much.
_COPIED_MOST_BYTES: Final = 4 << 30
#: Rows in one transaction: LMDB copies each changed leaf once for all of them.
_ROWS_AT_ONCE: Final = 1 << 16
#: The number of a pool's first copy.
_FIRST: Final = 1


class Restored(NamedTuple):
    """An index that was put back: its path, and its moment."""

    path: str
    moment: Moment


class _Source(NamedTuple):
    """What an index can be made from: a copy, and the last batch that the log has behind it."""

    last: int
    copied: Moment
    name: str
    log_fd: int


def restore_index(
    pool_fds: Sequence[int], place: IndexPlace, settings: Settings, syscalls: Syscalls
) -> Restored | None:
    """Make an index in *place* from the newest copy and the rows logged since.

    *pool_fds* are the directories of the pool's drives: of all their logs the one that leads
    furthest counts. In the pool the index is durable on return. None if no copy is whole. Raises
    NoSpace, OSError.
    """
    with contextlib.ExitStack() as stack:
        found = [open_log(pool_fd, syscalls) for pool_fd in pool_fds]
        log_fds = [log_fd for log_fd in found if log_fd is not None]
        for log_fd in log_fds:
            stack.callback(syscalls.close, log_fd)
        for source in sorted(_sources(log_fds, syscalls), reverse=True):
            try:
                with place.building() as path:
                    _load(source.log_fd, source.name, path, syscalls)
                    moment = _replay(source.log_fd, source.copied, path, settings, syscalls)
            except (IndexDamaged, Damaged, FormatUnknown) as error:
                _log.warning("index: a copy of it cannot be used: %s", error)
            else:
                return Restored(place.finish(path), moment)
    return None


def _sources(log_fds: Sequence[int], syscalls: Syscalls) -> Iterator[_Source]:
    """Yield what an index can be made from. With one log only the copies are compared."""
    for log_fd in log_fds:
        for copied, name, _ in found_copies(log_fd, syscalls):
            last = copied.number
            if log_fds[1:]:
                last = last_logged(log_fd, syscalls, last)
            yield _Source(last, copied, name, log_fd)


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


def begin_log(pool_fds: Sequence[int], held: HeldIndex, young: InodeNo, syscalls: Syscalls) -> int:
    """Begin the log anew with a copy of the index that is *held*; return the number of the copy.

    The first of *pool_fds* gets it. All inodes have numbers below *young*. Durable on return.
    Raises Damaged, OSError.
    """
    forget_log(pool_fds, syscalls)
    log_fd = open_log(pool_fds[0], syscalls, create=True)
    assert log_fd is not None
    try:
        write_copy(log_fd, syscalls, held, Moment(_FIRST, young, ()), paced=False)
    finally:
        syscalls.close(log_fd)
    return _FIRST


def convert_index(
    pool_fds: Sequence[int], map_size_bytes: int, young: InodeNo, syscalls: Syscalls
) -> int:
    """Begin the log with the sound index in the pool, where an earlier version had it, or mkfs.

    It is in the first of *pool_fds*; nobody has it open. Returns and raises what ``begin_log``
    does; ToolMissing, IndexDamaged.
    """
    env = open_environment(pool_index(pool_fds[0]), map_size_bytes, read_only=True)
    try:
        held = HeldIndex(env)
        try:
            return begin_log(pool_fds, held, young, syscalls)
        finally:
            held.end()
    finally:
        env.close()


def _enter(index: Index, rows: Rows) -> None:
    if index.preallocation_due():
        index.preallocate()
    with index.write() as txn:
        txn.enter_logged(dict(sorted(rows.items())))


def refuse_unreadable(path: str, prefixes: Iterable[bytes]) -> None:
    """Raise IndexDamaged or FormatUnknown unless the rows of *prefixes* and the root can be read.

    Raises ToolMissing if there is not enough address space. Writes nothing. A fork takes some ms,
    and some million rows take a second.
    """
    read_apart(lambda: walk(path, prefixes))


def refuse_broken(path: str) -> None:
    """Raise as ``refuse_unreadable`` before a server uses the index at *path*.

    A small index is looked at whole; of a larger one all pages, and the rows that a start reads.
    """
    read_apart(lambda: _look_whole(path) or walk(path, START_ROWS))


def _look_whole(path: str) -> int:
    """Look at every page and row of a small index; return how many rows, 0 for a larger one.

    Of a larger one all pages are looked at, and of a very large one none.
    """
    used_bytes = check_data_file(path, spare_pages=SPARE_PAGES)
    if used_bytes > WHOLE_LOOK_MOST_BYTES:
        if used_bytes <= BOUNDS_LOOK_MOST_BYTES:
            refuse_broken_pages(path)
        return 0
    if problems := verify_data_file(path):
        raise IndexDamaged(f"index: {problems[0]}")
    return walk(path, ALL_ROWS)


def read_apart(job: Callable[[], object]) -> None:
    """Do *job*, which reads an index, in a process of its own.

    Raises FormatUnknown or ToolMissing if *job* does, and IndexDamaged if it fails otherwise or the
    process dies.
    """
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about a fork with threads. The child takes none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _read_and_exit(job, writing)
        os.close(writing)
        writing = -1
        text = os.read(reading, _TEXT_MAX_BYTES).decode(errors="replace")
        status = os.waitpid(child, 0)[1]
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise IndexDamaged(f"index: reading it ends in {name}")
    exit_code = os.waitstatus_to_exitcode(status)
    for kind in (FormatUnknown, ToolMissing):
        if exit_code == kind.exit_code:
            raise kind(text)
    if exit_code != 0:
        raise IndexDamaged(text)


def walk(path: str, prefixes: Iterable[bytes]) -> int:
    """Read the rows of *prefixes* and the root; return how many. Raises Damaged, CommandErrors."""
    most = check_data_file(path, spare_pages=SPARE_PAGES) // _ROW_LEAST_BYTES
    count = 0
    with Index(path, read_only=True) as index:
        index.inode(ROOT_INODE)
        for prefix in prefixes:
            for rows in index.walk(prefix, _STEP_ROWS):
                count += len(rows)
                if count > most:  # leaves that lead back to themselves
                    raise IndexDamaged(f"index: it has more rows than {most}, which fit into it")
    return count


def _read_and_exit(job: Callable[[], object], writing: int) -> NoReturn:
    """Do the child's part: no output on stderr, no core file, no cleanup for the parent."""
    exit_code = IndexDamaged.exit_code
    try:
        faulthandler.disable()
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        job()
        exit_code = 0
    except (CommandError, Damaged, OSError) as error:
        if isinstance(error, CommandError):
            exit_code = error.exit_code
        os.write(writing, str(error).encode()[:_TEXT_MAX_BYTES])
    finally:
        os._exit(exit_code)


def compact_index(pool_fd: int, syscalls: Syscalls) -> int:
    """Compact the index of an open pool if that is worth it; nobody has the index open.

    An index that cannot be copied, or not now, stays as it is. Return how many bytes of free pages
    were given back.
    """
    path = pool_index(pool_fd)
    try:
        used_bytes = check_data_file(path, spare_pages=SPARE_PAGES)
        if used_bytes < _GAIN_LEAST_BYTES:
            return 0
        copied_bytes = _rows_bytes(path, used_bytes)
        gain_bytes = used_bytes - copied_bytes
        if not _is_due(used_bytes, copied_bytes) or not _has_room(pool_fd, copied_bytes, syscalls):
            return 0
        try:
            _copy(pool_fd, used_bytes, syscalls)
            _replace(pool_fd, syscalls)
        finally:
            remove_index(INDEX_NEW, pool_fd, syscalls)
    except (CommandError, Damaged, OSError) as error:
        _log.info("index: free pages not returned: %s", error)
        return 0
    _log.info("index: %d bytes of free pages returned to the device", gain_bytes)
    return gain_bytes


def _is_due(used_bytes: int, copied_bytes: int) -> bool:
    least_bytes = max(_GAIN_LEAST_BYTES, int(used_bytes * _GAIN_LEAST_SHARE))
    return used_bytes - copied_bytes >= least_bytes and copied_bytes <= _COPIED_MOST_BYTES


def _rows_bytes(path: str, map_bytes: int) -> int:
    """Return the bytes of all pages with rows. Raises IndexDamaged, ToolMissing, OSError."""
    env = open_environment(path, map_bytes, read_only=True)
    try:
        return rows_bytes(env)
    except lmdb.Error as error:
        raise_index_error(error)
    finally:
        env.close()


def _has_room(pool_fd: int, copied_bytes: int, syscalls: Syscalls) -> bool:
    """Whether the device has space for twice the copy: its trees and others need some, too."""
    status = syscalls.statvfs(pool_fd)
    return status.f_bavail * status.f_frsize > 2 * copied_bytes + _GAIN_LEAST_BYTES // 16


def _copy(pool_fd: int, map_bytes: int, syscalls: Syscalls) -> None:
    """Write a durable copy to ``index.new``. Raises IndexDamaged, ToolMissing, OSError."""
    syscalls.mkdir(INDEX_NEW, 0o700, dir_fd=pool_fd)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = syscalls.open(f"{INDEX_NEW}/{DATA_NAME}", flags, 0o600, dir_fd=pool_fd)
    try:
        read_apart(lambda: _write_copy(pool_index(pool_fd), map_bytes, fd))
        syscalls.fsync(fd)
    finally:
        syscalls.close(fd)
    check_data_file(pool_index(pool_fd, INDEX_NEW))


def _write_copy(path: str, map_bytes: int, fd: int) -> None:
    """Do the child's part, which reads every page; damage may kill it."""
    env = open_environment(path, map_bytes, read_only=True)
    try:
        env.copyfd(fd, compact=True)
    except lmdb.Error as error:
        raise_index_error(error)
    finally:
        env.close()


def _replace(pool_fd: int, syscalls: Syscalls) -> None:
    """Put the copy's file in the place of the old one by one rename. Raises OSError.

    So a kill at any time leaves an index. (A rebuild differs: it has no sound file to replace.)
    """
    syscalls.rename(
        f"{INDEX_NEW}/{DATA_NAME}", f"{INDEX}/{DATA_NAME}", src_dir_fd=pool_fd, dst_dir_fd=pool_fd
    )
    with contextlib.ExitStack() as stack:
        fd = syscalls.open(INDEX, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pool_fd)
        stack.callback(syscalls.close, fd)
        syscalls.fsync(fd)
