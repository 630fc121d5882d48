"""``python -I -S mount/supervisor READY_FD INSTALLED PROGRAM... -- ARGUMENTS...``: a supervisor.

PROGRAM and ARGUMENTS are the command line of the process that its servers are forked from
(mount/process/template.py). INSTALLED is the program that an upgrade runs ("": PROGRAM). READY_FD
is where the first start reports its result (-1: nowhere).

Run as a file, by an interpreter that looks for no installed packages, to stay small.
"""

import os
import signal
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(_HERE)))

from mount.supervisor.process import HANDED_ON, Supervisor  # noqa: E402 - where it is found
from mount.supervisor.systemd import Systemd  # noqa: E402
from mount.supervisor.templates import Program, become_parent_of_forked  # noqa: E402


def main() -> int:
    """Supervise, and return the exit code of the last server."""
    os.chdir("/")  # it must keep no directory busy
    with open("/proc/self/comm", "w") as name:
        name.write("kvfs-supervisor")
    ready_fd, installed, rest = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    words, arguments = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    if ready_fd >= 0:
        os.set_inheritable(ready_fd, False)
    become_parent_of_forked()
    environment = dict(os.environ)
    systemd = Systemd(environment)
    program = Program(words, arguments, environment)
    other = program.other([installed], "") if installed else program
    return _end_as(Supervisor(program, other, systemd, ready_fd).run())


def _end_as(status: int) -> int:
    """Return the exit code for a server's wait *status*, or die by the signal it died by.

    Only by a signal of HANDED_ON: to systemd an end by one of these is no failure.
    """
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    if number in HANDED_ON:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
