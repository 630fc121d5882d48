"""A writer that stores a few blocks and tells through shared memory where it is.

``python -m tests.support.kills.stores_to_kill DIRECTORY PREFIX WAY PROGRESS_FILE``: the first word
of the progress file is the number of the block being stored, the second says what is going on.
"""

import mmap
import os
import struct
import sys
from enum import IntEnum
from pathlib import Path
from typing import Final

from tests.support.clients.stamped import stamped
from tests.support.clients.stepping import say

WORDS: Final = struct.Struct("qq")
SIZE: Final = 8 << 20
#: Then the writer waits for its end: its bytes are made before, so that it spends its time writing.
BLOCKS: Final = 4
_CREATE: Final = os.O_WRONLY | os.O_CREAT


class Doing(IntEnum):
    """What the writer does at this moment."""

    BETWEEN = 0
    WRITING = 1
    FINISHING = 2
    ACKNOWLEDGED = 3


def store(directory: str, prefix: str, way: str, progress_file: str) -> None:
    """Store blocks PREFIX-0, PREFIX-1, ...; *way* is "buffered-place", "direct-rename" or so."""
    with open(progress_file, "r+b") as file:
        progress = mmap.mmap(file.fileno(), WORDS.size)
    medium, end = way.split("-")
    flags = _CREATE | (os.O_DIRECT if medium == "direct" else os.O_TRUNC)
    blocks = []
    for number in range(BLOCKS):
        blocks.append(mmap.mmap(-1, SIZE))
        blocks[-1][:] = stamped(f"{prefix}-{number}", SIZE)
    say("ready")
    os.write(1, b"storing\n")
    for number, memory in enumerate(blocks):
        name = f"{prefix}-{number}"
        path = f"{directory}/{name}" + (".tmp" if end == "rename" else "")
        WORDS.pack_into(progress, 0, number, Doing.BETWEEN)
        fd = os.open(path, flags, 0o644)
        WORDS.pack_into(progress, 0, number, Doing.WRITING)
        written = os.write(fd, memory)
        WORDS.pack_into(progress, 0, number, Doing.FINISHING)
        assert written == SIZE
        os.close(fd)
        if end == "rename":
            os.rename(path, f"{directory}/{name}")
        WORDS.pack_into(progress, 0, number, Doing.ACKNOWLEDGED)
    say("done")


def doing(progress_file: Path) -> tuple[int, Doing]:
    """Return the block that the writer was at, and what it did."""
    number, what = WORDS.unpack(progress_file.read_bytes())
    return number, Doing(what)


if __name__ == "__main__":
    store(*sys.argv[1:])
