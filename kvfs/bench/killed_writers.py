"""Writers that are killed half-way through a block: what a reader finds of it afterwards.

Run as ``python -m kvfs.bench.killed_writers FILE BYTES``, a writer writes so many bytes, says so,
and waits for its end with the file open.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvfs.client.subprocesses import program_again

_PROGRAM: Final = "kvfs.bench.killed_writers"
#: The kernel tells a file system of a close after the process has ended, and waits for no answer.
_CLOSED_WAIT_S: Final = 2.0
_LOOK_S: Final = 0.02


def halves_left(files: Sequence[Path], half_bytes: int) -> list[Path]:
    """Let a process write *half_bytes* of each of *files* and kill it; return which are there then.

    A writer that could not write at all leaves nothing.
    """
    command, environment = program_again(_PROGRAM)
    for file in files:
        with subprocess.Popen(
            [*command, str(file), str(half_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            writer.kill()
    give_up_s = time.monotonic() + _CLOSED_WAIT_S
    while (left := [file for file in files if file.exists()]) and time.monotonic() < give_up_s:
        time.sleep(_LOOK_S)
    return left


def main() -> None:
    """Write the half of a block, and stay."""
    path, half_bytes = sys.argv[1], int(sys.argv[2])
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(half_bytes))
        print("written", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
