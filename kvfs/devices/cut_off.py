"""A note that the XFS of a pool was cut off, kept until RUN says so, in case a start is killed.

The log's recovery (mount(2), seconds of it) leaves a clean log behind, and a process that is
killed meanwhile ends with it, before it could empty RUN. The note lies in /run, which lasts as
long as the boot whose page cache RUN vouches for.
"""

import contextlib
import os

from kvfs.core.mount_name import RUN_DIRECTORY


def note(epoch: int) -> None:
    """Remember that the pool with *epoch* was cut off; without a place for that, nothing."""
    with contextlib.suppress(OSError):
        os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
        os.close(os.open(_path(epoch), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def is_noted(epoch: int) -> bool:
    """Whether a start that was to tell RUN of it has not come so far."""
    return os.path.exists(_path(epoch))


def forget(epoch: int) -> None:
    """RUN says it now."""
    with contextlib.suppress(OSError):
        os.unlink(_path(epoch))


def _path(epoch: int) -> str:
    return f"{RUN_DIRECTORY}/{epoch:016x}.cut-off"
