"""A server without a supervisor, and a supervisor without a server, for tests that change one.

``kvfs mount --foreground`` is the supervisor, which starts the server as a program of its own.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

from tests.support.mounting import ROOT

#: Goes before ``kvfs.cli.main.main()``. Nobody reads what the server says; it may be said to a tree
#: that has no supervisor.
UNSUPERVISED: Final = """
try:
    from kvfs.machine import held_files
except ImportError:
    pass
else:
    import os, sys
    unread, link = held_files.link_pair()
    first = {"restarts": 0, "upgrades": 0, "longest_pause_s": 0.0, "died_s": 0.0}
    held_files.send(unread, {"held": [], "supervisor_pid": 0, "alive_every_s": 0.0, **first})
    sys.argv += ["--held-fd", str(link.detach())]
"""


def in_the_servers_place(
    program: str, arguments: Sequence[str], ready_fd: int
) -> tuple[list[str], dict[str, str]]:
    """Return command line and environment of a supervisor that starts *program*, in Python.

    For what comes behind *program* see ``supervised`` of kvfs/client/subprocesses.py.
    """
    supervisor = [sys.executable, "-I", "-S", str(ROOT / "mount" / "supervisor" / "__main__.py")]
    server = [sys.executable, "-c", program]
    return [*supervisor, str(ready_fd), "", *server, "--", *arguments], dict(os.environ)
