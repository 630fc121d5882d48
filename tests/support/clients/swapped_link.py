"""An attack: a link to another's file takes a name's place between the two tries of an open.

``python -m tests.support.clients.swapped_link OWN VICTIM TRIES``: as nobody, in directory OWN.
"""

import errno
import os
import signal
import sys

from tests.support.clients.stepping import say
from tests.support.kernel.calls import RENAME_EXCHANGE, renameat2

NOBODY = 65534
_EXPECTED = (errno.EACCES, errno.ESTALE, errno.ENOENT)


def swap_for_ever(file: str, link: str) -> None:
    """Let two names change places."""
    while True:
        renameat2(file, link, RENAME_EXCHANGE)


def main(own: str, victim: str, tries: int) -> None:
    """Empty the file again and again, while a link to *victim* changes places with it."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    file, link = os.path.join(own, "file"), os.path.join(own, "link")
    with open(file, "wb") as written:
        written.write(b"mine")
    os.symlink(victim, link)
    swapper = os.fork()
    if swapper == 0:
        swap_for_ever(file, link)
    try:
        for _ in range(tries):
            try:
                fd = os.open(file, os.O_WRONLY | os.O_TRUNC)
            except OSError as error:
                if error.errno not in _EXPECTED:
                    raise
                continue
            os.write(fd, b"mine")
            os.close(fd)
    finally:
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)
    say("swapped")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
