"""Which processes hold a lock on a file, from proc_locks(5), without taking it.

A lock tried for the look would fail who locks at the same time.
"""

import os

from kvfs.machine.process_ends import has_exited


def holders(status: os.stat_result) -> set[int]:
    """Return the processes that took a lock on the file with *status* which is still held.

    Dead ones too, whose open file somebody keeps (a loop device); not those of other pid
    namespaces. Raises OSError.
    """
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with open("/proc/locks", encoding="ascii") as file:
        lines = [line.split() for line in file]
    # "1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF"; who waits for a lock has an arrow before.
    return {int(fields[4]) for fields in lines if len(fields) > 5 and fields[5] == wanted}


def is_alive(pid: int) -> bool:
    """Whether there is a process *pid* that has not ended: of one that has nobody may ask yet."""
    return os.path.exists(f"/proc/{pid}") and not has_exited(pid)
