"""Which mount a control socket belongs to, and why its server does not answer.

Whoever reads from a silent device waits in the kernel, and no signal ends that. So a separate
program reads, past the page cache, and is left behind if it takes too long
(``python -m kvfs.client.late_answer SOURCE``).
"""

import contextlib
import mmap
import os
import sys
from typing import ClassVar

from kvfs.client.subprocesses import ended_in_time
from kvfs.core.errors import ServeFailed
from kvfs.core.mount_name import name_of, socket_path
from kvfs.core.pool_layout import INODES
from kvfs.core.types import PAGE_BYTES
from kvfs.machine.mount_table import FS_TYPE, Mount, mounts
from kvfs.machine.process_ends import device_wait
from kvfs.storage.direct_open import open_direct


class WaitsForDevice(ServeFailed):
    """The server does not answer, because the device below does not."""

    exit_code: ClassVar[int] = ServeFailed.exit_code


def mount_behind(path: str) -> Mount | None:
    """Return the mount of the server with the socket *path*, by its name; None if unknown."""
    for mount in mounts():
        if mount.fs_type == FS_TYPE and socket_path(name_of(mount.mountpoint)) == path:
            return mount
    return None


def no_answer(path: str, server_pid: int, waited_s: float) -> ServeFailed:
    """Return the error for server *server_pid* behind *path*, which did not answer in time."""
    late = f"{path}: no answer within {waited_s:g} s"
    wait = device_wait(server_pid)
    if wait is None:
        return ServeFailed(late)
    mount = mount_behind(path)
    device = "its device" if mount is None else f"its device {mount.source}"
    return WaitsForDevice(
        f"{late}: server {server_pid} waits in the kernel for {device} ({wait}). It goes on by "
        "itself when the device answers. Do not kill it: no signal ends it before"
    )


def device_answers(source: str) -> bool:
    """Whether the drive, image or directory *source* answers within 3 s, if only with an error."""
    return ended_in_time("kvfs.client.late_answer", source) is not None


def main() -> None:
    """Read the beginning of a source. An error is an answer, too."""
    source = sys.argv[1]
    with contextlib.suppress(OSError), mmap.mmap(-1, PAGE_BYTES) as aligned:
        path = f"{source}/{INODES}" if os.path.isdir(source) else source
        fd = open_direct(lambda direct: os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct))
        os.preadv(fd, [aligned], 0)


if __name__ == "__main__":
    main()
