"""Writers through io_uring; each runs as a process, step by step (stepping.py).

``python -m tests.support.clients.uring_writers NAME PATH SIZE``.
"""

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.clients.stepping import say
from tests.support.kernel.uring import Ring

#: A ring's worth.
_PARTS: Final = 32
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def _memory(size: str) -> mmap.mmap:
    memory = mmap.mmap(-1, int(size))
    memory[:] = b"u" * int(size)
    return memory


def closes_while_writing(path: str, size: str) -> None:
    """Begin with many writes, close the descriptor, and wait: to be killed, or for their end."""
    memory = _memory(str(int(size) // _PARTS))
    with Ring() as ring:
        fd = os.open(path, _CREATE, 0o644)
        say("ready")
        for part in range(_PARTS):
            ring.write(fd, memory, part * len(memory))
        os.close(fd)
        os.write(1, b"closed\n")
        for _ in range(_PARTS):
            assert ring.wait() == len(memory)
        say("written")


def has_no_descriptor(path: str, size: str) -> None:
    """Write to a file that is in a slot of the ring alone, half of it, and wait; then the rest."""
    memory = _memory(size)
    with Ring() as ring:
        ring.open_direct(Path(path), _CREATE)
        ring.write(0, memory, 0, fixed=True)
        assert ring.wait() == int(size)
        say("half")
        ring.write(0, memory, int(size), fixed=True)
        assert ring.wait() == int(size)
        ring.close_direct()
        say("closed")


WRITERS: Final[dict[str, Callable[..., None]]] = {
    writer.__name__: writer for writer in (closes_while_writing, has_no_descriptor)
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](*sys.argv[2:])
