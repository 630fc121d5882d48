"""A process that stores one block as connectors do, and stops in its middle (stepping.py).

``python -m tests.support.nfs.block_writer PATH SIZE_BYTES SEED``: half of it is at the server when
it says so; then it says how the store ended.
"""

import errno
import os
import sys

from tests.support.clients.stamped import stamped
from tests.support.clients.stepping import say


def store(path: str, size_bytes: int, seed: int) -> None:
    """Write PATH.tmp-PID in two halves and rename it."""
    name = os.path.basename(path)
    data = stamped(name, size_bytes, seed)
    half = size_bytes // 2
    temporary = f"{path}.tmp-{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(fd, data[:half])
        os.fsync(fd)
        say("half")
        os.write(fd, data[half:])
    finally:
        os.close(fd)
    os.rename(temporary, path)


if __name__ == "__main__":
    try:
        store(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except OSError as error:
        say(f"failed {errno.errorcode.get(error.errno or 0)}")
    else:
        say("stored")
