"""A worker of ``kvfs bench`` that tells what each store took, and asks a full file system again."""

import errno
import mmap
import time
from typing import Final

from kvfs.bench import worker
from kvfs.bench.worker import Task, store

#: Before a block that found no room is tried again.
_REFUSED_WAIT_S: Final = 0.01
#: Refusals of one worker in one order after which nobody seems to make room.
_REFUSED_MAX: Final = 2000


def store_full(task: Task, buffer: mmap.mmap) -> dict[str, object]:
    """Store as ``store`` does, and return what each took; a full file system is asked again.

    The time of a refused block is that of all its tries.
    """
    each_ns: list[int] = []
    refused = 0
    for block in task.blocks:
        start_ns = time.monotonic_ns()
        while True:
            try:
                store(task._replace(blocks=[block]), buffer)
                break
            except OSError as error:
                refused += 1
                if error.errno != errno.ENOSPC or refused > _REFUSED_MAX:
                    raise
                time.sleep(_REFUSED_WAIT_S)
        each_ns.append(time.monotonic_ns() - start_ns)
    return {"each_ns": each_ns, "refused": refused}


if __name__ == "__main__":
    worker.ACTIONS["store_full"] = store_full
    worker.main()
