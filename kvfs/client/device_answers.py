"""Whether the device below a source answers a read, asked by a program that may be left behind.

Whoever reads from a silent device waits in the kernel, and no signal ends that. So a separate
program reads (``python -m kvfs.client.device_answers SOURCE``), past the page cache.
"""

import contextlib
import mmap
import os
import sys
from typing import Final

from kvfs.client.subprocesses import ended_in_time
from kvfs.core.pool_layout import INODES

_READ_BYTES: Final = mmap.PAGESIZE
_MODULE: Final = "kvfs.client.device_answers"


def device_answers(source: str) -> bool:
    """Whether the drive, image or directory *source* answers within 3 s, if only with an error."""
    return ended_in_time(_MODULE, source) is not None


def main() -> None:
    """Read the beginning of the source. An error is an answer, too."""
    source = sys.argv[1]
    with contextlib.suppress(OSError), mmap.mmap(-1, _READ_BYTES) as aligned:
        path = f"{source}/{INODES}" if os.path.isdir(source) else source
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # tmpfs has no O_DIRECT everywhere
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.preadv(fd, [aligned], 0)


if __name__ == "__main__":
    main()
