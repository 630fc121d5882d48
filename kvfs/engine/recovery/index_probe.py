"""Read an index in a process of its own before this one does.

Some damage makes LMDB end its process by SIGABRT or SIGBUS. Whatever opens a pool must survive to
report it.
"""

import faulthandler
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from kvfs.core.errors import CommandError, Damaged, FormatUnknown, IndexDamaged, ToolMissing
from kvfs.core.records import INODE_PREFIX, META_PREFIX
from kvfs.core.types import ROOT_INODE
from kvfs.storage.index import Index
from kvfs.storage.index_pages import refuse_broken_pages
from kvfs.storage.index_swap import index_path
from kvfs.storage.lmdb_file import SPARE_PAGES, check_data_file, verify_data_file

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


def refuse_unreadable(pool_fd: int, prefixes: Iterable[bytes]) -> None:
    """Raise IndexDamaged or FormatUnknown unless the rows of *prefixes* and the root can be read.

    Raises ToolMissing if there is not enough address space. Writes nothing. A fork takes some ms,
    and some million rows take a second.
    """
    read_apart(lambda: walk(index_path(pool_fd), prefixes))


def refuse_broken(pool_fd: int) -> None:
    """Raise as ``refuse_unreadable`` before a server uses the index.

    A small index is looked at whole; of a larger one all pages, and the rows that a start reads.
    """
    path = index_path(pool_fd)
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
