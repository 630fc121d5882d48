"""A program beside the server that ends the connection when the server is killed.

The kernel ends all calls on a mount when the last descriptor of /dev/fuse is closed: in a process
that is killed not before its last thread is gone. The notifier's may wait in the kernel for the
lock of a directory, whose owner waits for an answer of ours (mount/fuse/invalidations.py): for
ever, both.

PR_SET_PDEATHSIG is sent when the *thread* ends that started the program (prctl(2)), which is the
loop's. It is a shell, since it lies there as long as the mount: 0.2 MiB. What may come to all
processes of a session or a unit ends the server in its own time, and not this.
"""

import logging
import subprocess
from typing import Final

_log: Final = logging.getLogger(__name__)

#: Its output is the connection's ``abort`` file; its input ends with the server.
_PROGRAM: Final = "trap '' HUP INT TERM; trap 'echo 1; exit' USR1; read -r end"
_COMMAND: Final = ("setpriv", "--pdeathsig", "USR1", "--", "sh", "-c", _PROGRAM, "kvfs-guard")
_END_WAIT_S: Final = 2.0


class AbortGuard:
    """One such program, for as long as the mount is served."""

    def __init__(self, abort_fd: int) -> None:
        """Start it, on the main thread; without *abort_fd* (-1) or where it cannot be, go without.

        A killed server's callers then may wait until ``kvfs umount``.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if abort_fd < 0:
            return
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=abort_fd,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        except OSError as error:
            _log.warning("calls on the mount will hang if its server is killed: %s", error)

    def dismiss(self) -> None:
        """End it: the server ends by itself."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
