"""Whether a process waits in the kernel for a device that does not answer.

A thread in the state D ends for no signal, not even for SIGKILL, until the device answers
(proc_pid_stat(5)). A process with such a thread stays after a kill, with all that it has open and
locked; left alone, it goes on by itself.
"""

import os
from typing import Final, NamedTuple

from kvfs.core.shown_names import printable
from kvfs.machine.process_ends import open_to_read, read_at_once, status_of

_WORD_BYTES: Final = 64
_WAITS: Final = b"\nState:\tD"
#: Where a caller waits for a FUSE server (fs/fuse/dev.c). If that is the process itself, no device
#: is at fault.
_FOR_FUSE: Final = "request_wait_answer"


class DeviceWait(NamedTuple):
    """A thread that waits."""

    thread: str
    """The thread's name."""
    function: str
    """The function of the kernel that it waits in; "?" if the kernel does not say."""

    def __str__(self) -> str:
        return f"thread {self.thread} waits in {self.function}"


def device_wait(pid: int) -> DeviceWait | None:
    """Return a thread of *pid* that waits for a device at this moment; None if none does.

    All threads are looked at: the main one may wait for what another has locked. Any read from a
    device is such a wait, mostly a short one, so ask only for a process that has been silent. None
    also for a process that is gone, or whose threads cannot be listed.
    """
    threads = f"/proc/{pid}/task"
    try:
        tids = sorted(int(name) for name in os.listdir(threads)) if pid > 0 else []
    except OSError:
        return None
    for tid in tids:
        if _WAITS not in status_of(tid):
            continue
        function = _told(f"{threads}/{tid}/wchan")
        if function != _FOR_FUSE:
            return DeviceWait(_told(f"{threads}/{tid}/comm"), function)
    return None


def _told(path: str) -> str:
    told = read_at_once(path, _WORD_BYTES, open_to_read).decode(errors="replace")
    # The kernel says 0 if the thread runs again, or if the reader may not know.
    return printable(told.removesuffix("\n")) if told not in ("", "0") else "?"
