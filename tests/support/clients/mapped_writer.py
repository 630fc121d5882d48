"""Stores blocks through a mapping, as programs do that know how long a block will be.

Run as a program: ROOT NAME SIZE_BYTES HOW. It sets the draft to its length, fills it through a
shared mapping (HOW: mapped) or by write(2) (written), and renames it. No byte of it is asked for:
a mapping that finds no space ends the process (SIGBUS).
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.clients.stamped import stamped
from tests.support.mounts.mounting import ROOT

_STEP_BYTES: Final = 1 << 20


def store_mapped(root: str, name: str, size_bytes: int, how: str) -> None:
    """Store block *name* in directory *root*. Raises OSError."""
    data = stamped(name, size_bytes)
    fd = os.open(f"{root}/{name}.tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(fd, size_bytes)
        if how == "mapped":
            with mmap.mmap(fd, size_bytes) as memory:
                for at in range(0, size_bytes, _STEP_BYTES):
                    piece = data[at : at + _STEP_BYTES]
                    memory[at : at + len(piece)] = piece
        else:
            for at in range(0, size_bytes, _STEP_BYTES):
                os.pwrite(fd, data[at : at + _STEP_BYTES], at)
    finally:
        os.close(fd)
    os.rename(f"{root}/{name}.tmp", f"{root}/{name}")


def begin(root: Path, name: str, size_bytes: int, how: str) -> "subprocess.Popen[bytes]":
    """Start a process that does; its exit code is 0, an errno, or less than 0 for a signal."""
    command = [sys.executable, "-m", "tests.support.clients.mapped_writer"]
    return subprocess.Popen([*command, str(root), name, str(size_bytes), how], cwd=ROOT)


def ends(writers: list["subprocess.Popen[bytes]"], wait_s: float) -> Iterator[int]:
    """Yield how each ended, within *wait_s* for each."""
    for writer in writers:
        try:
            yield writer.wait(wait_s)
        finally:
            writer.kill()
            writer.wait()


def main() -> int:
    """Store what the arguments say."""
    root, name, size_bytes, how = sys.argv[1:]
    try:
        store_mapped(root, name, int(size_bytes), how)
    except OSError as error:
        print(name, error, file=sys.stderr)
        return error.errno or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
