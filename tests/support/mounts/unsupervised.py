"""A server without a supervisor, and a supervisor without a server, for tests that change one.

``kvfs mount --foreground`` is the supervisor, which starts the server as a program of its own.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

from tests.support.mounts.mounting import ROOT

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
    first = {"restarts": 0, "upgrades": 0, "longest_pause_s": 0.0, "died_s": 0.0, "next_server": ""}
    held_files.send(unread, {"held": [], "supervisor_pid": 0, "alive_every_s": 0.0, **first})
    sys.argv += ["--held-fd", str(link.detach())]
"""


#: Goes before a program that is run in each server's place: the template, which forks them.
_FORKED: Final = f"""
import socket, sys
sys.path.insert(0, {str(ROOT)!r})
from kvfs.machine import held_files
from mount.process.template import fork_servers
template_fd = int(sys.argv[sys.argv.index("--template-fd") + 1])
try:
    link_fd, ready_fd = fork_servers(template_fd, lambda: None, lambda formats: "")
except held_files.SupervisorGone:
    sys.exit()
held_files.receive(socket.socket(fileno=link_fd))  # it is to begin
"""


def supervisor_of(
    template: str, arguments: Sequence[str], ready_fd: int
) -> tuple[list[str], dict[str, str]]:
    """Return command line and environment of a supervisor whose template is this Python program.

    For what comes behind *template* see ``supervised`` of kvfs/client/subprocesses.py.
    """
    supervisor = [sys.executable, "-I", "-S", str(ROOT / "mount" / "supervisor" / "__main__.py")]
    program = [sys.executable, "-c", template]
    return [*supervisor, str(ready_fd), "", *program, "--", *arguments], dict(os.environ)


def in_the_servers_place(
    program: str, arguments: Sequence[str], ready_fd: int
) -> tuple[list[str], dict[str, str]]:
    """Return the same of one whose servers run *program*; ``ready_fd`` is theirs to say it."""
    return supervisor_of(f"{_FORKED}\n{program}", arguments, ready_fd)
