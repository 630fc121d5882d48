"""Replacing a file of the pool as a whole: a reader finds the old one or the new one."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.storage.syscalls import Syscalls


@contextmanager
def replaced_file(
    pool_fd: int, syscalls: Syscalls, name: str, new_name: str, *, durable: bool
) -> Iterator[int]:
    """Yield a descriptor of a new file *new_name*, which is renamed to *name* at the end.

    With *durable* its bytes are synced before the rename. The rename itself lasts once the caller
    has synced *pool_fd*. After an error the new file is removed. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = syscalls.open(new_name, flags, 0o600, dir_fd=pool_fd)
    try:
        yield fd
        if durable:
            syscalls.fsync(fd)
        syscalls.rename(new_name, name, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            syscalls.unlink(new_name, dir_fd=pool_fd)
        raise
    finally:
        syscalls.close(fd)
