"""The sockets between the channel and libfuse hold what passes them, with and without privilege."""

import os
import socket
import subprocess
import sys
from typing import Final

import pytest

from kvfs.core.errors import ServeFailed
from mount.fuse.libfuse_pair import ROOM_MIN_BYTES, libfuse_pair
from tests.support.mounts.mounting import ROOT

#: net.core.wmem_max where nobody changed it (include/net/sock.h: SK_WMEM_MAX).
USUAL_WMEM_MAX: Final = 212992
#: The kernel's bounds: an extended attribute (XATTR_SIZE_MAX), with its name and the headers.
LARGEST_BYTES: Final = (64 << 10) + 1024
#: pyfuse3's tasks, each with a reply of an entry and a handle.
TASKS: Final = 256
SMALL_BYTES: Final = 16 + 128 + 16

WITHOUT_PRIVILEGE: Final = f"""\
import sys
from kvfs.core.errors import ServeFailed
from mount.fuse.libfuse_pair import libfuse_pair
ours, theirs = libfuse_pair({USUAL_WMEM_MAX})
for end, other in ((ours, theirs), (theirs, ours)):
    for _ in range({TASKS}):
        end.send(bytes({SMALL_BYTES}))
    end.send(bytes({LARGEST_BYTES}))
    sizes = [len(other.recv(1 << 20)) for _ in range({TASKS} + 1)]
    assert sizes == [{SMALL_BYTES}] * {TASKS} + [{LARGEST_BYTES}]
try:
    libfuse_pair(4096)
except ServeFailed as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be without one capability")
def test_without_net_admin_all_that_passes_at_once_fits_the_usual_buffer() -> None:
    setpriv = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    done = subprocess.run(
        [*setpriv, sys.executable, "-c", WITHOUT_PRIVILEGE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # What would not fit is refused at the start, with the way out.
    assert "sysctl net.core.wmem_max=212992 raises it" in done.stdout.replace("`", "")


def test_both_ends_have_the_room_and_wait_for_nobody() -> None:
    ours, theirs = libfuse_pair()
    with ours, theirs:
        for end in (ours, theirs):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= ROOM_MIN_BYTES
            with pytest.raises(BlockingIOError):
                end.recv(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets what it asks for")
def test_too_little_room_is_refused() -> None:
    with pytest.raises(ServeFailed, match="a socket's buffer has 4608 bytes"):
        libfuse_pair(1)
