"""Where the index is in a pool, and how a rebuilt one replaces it.

The new index is complete and durable before the old one is touched. Then ``index`` becomes
``index.old`` and ``index.new`` becomes ``index``. With an ``index.old`` and no ``index``, the swap
was interrupted between the two, and ``index.new`` is complete.
"""

import contextlib

from kvfs.core.pool_layout import DATA_NAME, INDEX, INDEX_NEW, INDEX_OLD, LOCK_NAME
from kvfs.core.settings import Settings
from kvfs.storage.index import Index
from kvfs.storage.journal import Journal
from kvfs.storage.row_log import UnloggedRows
from kvfs.storage.syscalls import Syscalls


def index_path(pool_fd: int, name: str = INDEX) -> str:
    """Return a path to the pool's index, by fd because a detached mount has no other path."""
    return f"/proc/self/fd/{pool_fd}/{name}"


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
    for file in (DATA_NAME, LOCK_NAME):
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(f"{name}/{file}", dir_fd=pool_fd)
    with contextlib.suppress(FileNotFoundError):
        syscalls.rmdir(name, dir_fd=pool_fd)


def _exists(name: str, pool_fd: int, syscalls: Syscalls) -> bool:
    try:
        syscalls.stat(name, dir_fd=pool_fd)
    except FileNotFoundError:
        return False
    return True


def open_index(
    pool_fd: int,
    settings: Settings,
    syscalls: Syscalls,
    journal: Journal | None = None,
    unlogged: UnloggedRows | None = None,
) -> Index:
    """Open the index of a pool as *settings* say. Raises what ``Index`` raises."""
    return Index(
        index_path(pool_fd),
        map_size_bytes=settings.index_map_bytes,
        preallocate_bytes=settings.index_preallocate_bytes,
        read_only=settings.read_only,
        syscalls=syscalls,
        journal=journal,
        unlogged=unlogged,
    )
