"""Where the index of a pool is while it is served: in memory, or in the pool itself.

In memory it is a directory on a tmpfs, which outlives the server and its supervisor, but no reboot;
RUN names it. The device has copies of it and the rows logged since (row_log.py).
A server that is killed leaves it there, and a clean stop removes it.

In the pool a new index is complete and durable before the old one is touched. Then ``index``
becomes ``index.old`` and ``index.new`` becomes ``index``. With an ``index.old`` and no ``index``,
the swap was interrupted between the two, and ``index.new`` is complete.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.core.pool_layout import DATA_NAME, INDEX, INDEX_NEW, INDEX_OLD, LOCK_NAME
from kvfs.core.settings import Settings
from kvfs.core.types import STAT_BLOCK_BYTES
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import UnloggedRows
from kvfs.storage.journal import Journal
from kvfs.storage.memory_files import discard_blocks
from kvfs.storage.run_state import read_run_state
from kvfs.storage.syscalls import Syscalls

#: The setting ``index_place``; any other value is a directory on a tmpfs.
IN_MEMORY: Final = "memory"
IN_POOL: Final = "pool"
#: The tmpfs that every Linux has, for half of the memory (shm_overview(7)).
_SHARED_MEMORY: Final = "/dev/shm"
_NAME: Final = "kvfs-"
_OWN_MODE: Final = 0o700
_IN_POOL: Final = "/proc/self/fd/"


def pool_index(pool_fd: int, name: str = INDEX) -> str:
    """Return a path to the index in the pool, by fd: a detached mount has no other path."""
    return f"{_IN_POOL}{pool_fd}/{name}"


def present_index(pool_fd: int, said: str) -> str | None:
    """Return the path of the index that RUN *said* (empty: in the pool); None: it is not there.

    A pool may come from somebody else, and name what is not its own. So a directory in memory has
    a name that only its server and its RUN know, inside one that nobody else may list.
    """
    path = said or pool_index(pool_fd)
    try:
        if said and not _is_ours(os.path.dirname(said)):
            return None
        status = os.stat(f"{path}/{DATA_NAME}")
    except OSError:
        return None
    return path if status.st_size else None


def _is_ours(directory: str) -> bool:
    """Whether *directory* is one that a server of this user made. Raises OSError."""
    status = os.lstat(directory)
    return (
        os.path.basename(directory).startswith(_NAME)
        and stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and stat.S_IMODE(status.st_mode) == _OWN_MODE
    )


class IndexAt(NamedTuple):
    """The path of the index; ``logged``: the batch of the log that it is at, 0: at none."""

    path: str
    logged: int

    @property
    def in_memory(self) -> str:
        """Its directory, for RUN; empty if it is in the pool."""
        return "" if self.path.startswith(_IN_POOL) else self.path

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return what the index takes of its tmpfs, and what is free there.

        None if it is in the pool, or if somebody has removed its file, which is open still.
        """
        if not self.in_memory:
            return None
        try:
            space = os.statvfs(self.path)
            taken_bytes = os.stat(f"{self.path}/{DATA_NAME}").st_blocks * STAT_BLOCK_BYTES
        except FileNotFoundError:
            return None
        return taken_bytes, space.f_bavail * space.f_frsize


class IndexPlace:
    """Makes room for an index of one pool, and removes those that are not needed any more."""

    def __init__(
        self,
        drives: Sequence[tuple[int, str]],
        settings: Settings,
        syscalls: Syscalls,
        *,
        in_pool: bool,
    ) -> None:
        """*in_pool*: not in the ``index_memory_dir`` of *settings*, but on the first of *drives*.

        *drives*: the pool's directory on each drive that is there, and what an index is called
        after that was made when it was the first; no pool that may be served at the same time has
        the same (``Device.index_places``).
        """
        self._pool_fds = [pool_fd for pool_fd, _ in drives]
        self._pool_fd = self._pool_fds[0]
        self._syscalls = syscalls
        #: The start of the names of this pool's directories: the first is for a new one.
        self._prefixes = tuple(map(_prefix, (pool_id for _, pool_id in drives)))
        self._top = settings.index_memory_dir
        self._writes = not settings.read_only
        self.in_pool = in_pool

    @contextlib.contextmanager
    def building(self) -> Iterator[str]:
        """Yield an empty directory to make an index in; if that fails, it goes. Raises OSError."""
        path = self._begin()
        try:
            yield path
        except BaseException:  # an interrupt, too: nobody else knows the directory
            self.discard(path)
            raise

    def _begin(self) -> str:
        if self.in_pool:
            settle_index(self._pool_fd, self._syscalls)
            self._syscalls.mkdir(INDEX_NEW, 0o700, dir_fd=self._pool_fd)
            return pool_index(self._pool_fd, INDEX_NEW)
        outer = self._new_outer()
        self._syscalls.mkdir(outer, _OWN_MODE)
        path = f"{outer}/{secrets.token_hex(16)}"
        self._syscalls.mkdir(path, _OWN_MODE)
        return path

    def _new_outer(self) -> str:
        return f"{self._top}/{self._prefixes[0]}{secrets.token_hex(4)}"

    def move(self, path: str) -> str:
        """Give the index in memory at *path*, and what is beside it, another path; return that.

        Whoever knows the former one does not find it any more. Raises OSError.
        """
        before, after = os.path.dirname(path), self._new_outer()
        os.rename(before, after)
        return f"{after}/{os.path.basename(path)}"

    def finish(self, path: str) -> str:
        """Make what ``building`` left in *path* the index; return its path. Raises OSError."""
        if self.in_pool:
            replace_index(self._pool_fd, self._syscalls)
            return pool_index(self._pool_fd)
        return path

    def discard(self, path: str) -> None:
        """Remove an index in memory, or one in the pool that is not complete. Raises OSError."""
        if path.startswith(_IN_POOL):
            remove_index(os.path.basename(path), self._pool_fd, self._syscalls)
        else:
            discard_index(path, self._syscalls)

    def discard_in_pool(self) -> None:
        """Remove the index that is in the pool. Raises OSError."""
        remove_index(INDEX, self._pool_fd, self._syscalls)

    def discard_others(self, path: str) -> None:
        """Remove what this pool has in memory besides *path*: earlier servers left it.

        So is what is in the pool on other drives than the first, since another was that. What
        cannot be removed is left to the next start.
        """
        for pool_fd in self._pool_fds[1:] if self._writes else ():
            with contextlib.suppress(OSError):
                settle_index(pool_fd, self._syscalls)
                remove_index(INDEX, pool_fd, self._syscalls)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(self._top):
                outer = f"{self._top}/{name}"
                if name.startswith(self._prefixes) and outer != os.path.dirname(path):
                    self._discard_outer(outer)

    def _discard_outer(self, outer: str) -> None:
        with contextlib.suppress(OSError):
            if _is_ours(outer):
                for name in os.listdir(outer):
                    if not is_used(f"{outer}/{name}"):
                        discard_index(f"{outer}/{name}", self._syscalls)
                with contextlib.suppress(OSError):
                    self._syscalls.rmdir(outer)


def _prefix(pool_id: str) -> str:
    return f"{_NAME}{hashlib.sha256(pool_id.encode()).hexdigest()[:16]}."


def is_used(path: str) -> bool:
    """Whether another process has the index in memory at *path* open.

    A part of a pool's drives may be served while another is looked at. LMDB has a lock on its file
    (``mdb_env_setup_locks``); nothing of this process may be open there, since the kernel would
    take its lock for given up.
    """
    try:
        fd = os.open(f"{path}/{LOCK_NAME}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def forget_index(pool_fd: int) -> None:
    """Remove what a killed server left of the pool's index in memory. Raises OSError."""
    syscalls = Syscalls()
    said = read_run_state(pool_fd, syscalls).index_dir
    if said and present_index(pool_fd, said) and not is_used(said):
        discard_index(said, syscalls)


def discard_index(path: str, syscalls: Syscalls) -> None:
    """Remove the index in memory at *path*, if it is there, and the extents. Raises OSError.

    Directories with files of others stay.
    """
    _unlink_files(path, syscalls)
    with contextlib.suppress(OSError):
        syscalls.rmdir(path)
    discard_blocks(path)
    with contextlib.suppress(OSError):
        syscalls.rmdir(os.path.dirname(path))


def _unlink_files(path: str, syscalls: Syscalls) -> None:
    for file in (DATA_NAME, LOCK_NAME):
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(f"{path}/{file}")


def settle_index(pool_fd: int, syscalls: Syscalls) -> None:
    """Finish or undo what an interrupted rebuild left behind. Raises OSError."""
    if _exists(INDEX_OLD, pool_fd, syscalls):
        if not _exists(INDEX, pool_fd, syscalls):
            syscalls.rename(INDEX_NEW, INDEX, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
            syscalls.fsync(pool_fd)
        remove_index(INDEX_OLD, pool_fd, syscalls)
    remove_index(INDEX_NEW, pool_fd, syscalls)


def replace_index(pool_fd: int, syscalls: Syscalls) -> None:
    """Put the complete and durable ``index.new`` in the place of ``index``. Raises OSError."""
    if _exists(INDEX, pool_fd, syscalls):
        syscalls.rename(INDEX, INDEX_OLD, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
        # Otherwise a power loss could leave the second rename without the first.
        syscalls.fsync(pool_fd)
    syscalls.rename(INDEX_NEW, INDEX, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
    syscalls.fsync(pool_fd)
    remove_index(INDEX_OLD, pool_fd, syscalls)


def remove_index(name: str, pool_fd: int, syscalls: Syscalls) -> None:
    """Remove the index directory *name*; a missing one is fine. Raises OSError."""
    _unlink_files(pool_index(pool_fd, name), syscalls)
    with contextlib.suppress(FileNotFoundError):
        syscalls.rmdir(name, dir_fd=pool_fd)


def _exists(name: str, pool_fd: int, syscalls: Syscalls) -> bool:
    try:
        syscalls.stat(name, dir_fd=pool_fd)
    except FileNotFoundError:
        return False
    return True


def open_index(
    path: str,
    settings: Settings,
    syscalls: Syscalls,
    journal: Journal | None = None,
    unlogged: UnloggedRows | None = None,
) -> Index:
    """Open the index at *path* as *settings* say. Raises what ``Index`` raises."""
    return Index(
        path,
        map_size_bytes=settings.index_map_bytes,
        preallocate_bytes=settings.index_preallocate_bytes,
        read_only=settings.read_only,
        syscalls=syscalls,
        journal=journal,
        unlogged=unlogged,
        in_memory=not path.startswith(_IN_POOL),
    )
