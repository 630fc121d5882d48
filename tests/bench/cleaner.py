"""The cleaner that an operator runs beside a plain file system: the oldest files go.

``python -m kvfs.bench.cleaner DIR START_SHARE STOP_SHARE``: whenever more than START of the file
system is taken, delete the files that were written longest ago until it is STOP. Such a script is
what connectors without a delete path are deployed with.
"""

import contextlib
import os
import sys
import time
from typing import Final

#: Between two looks: a tenth of what a drive fills in at the lowest headroom that is of use.
_LOOK_S: Final = 0.02


def taken(directory: str) -> float:
    """Return the share of the file system under *directory* that is taken."""
    totals = os.statvfs(directory)
    return 1 - totals.f_bavail / totals.f_blocks


def clean(directory: str, stop_share: float) -> None:
    """Delete the oldest files until no more than *stop_share* is taken."""
    with os.scandir(directory) as listed:
        # Those that are being written have temporary names; without one none would be safe.
        files = sorted(
            (file.stat().st_mtime_ns, file.path)
            for file in listed
            if not file.name.endswith(".tmp")
        )
    for _, path in files:
        if taken(directory) <= stop_share:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def main() -> None:
    """Clean until killed."""
    directory, start, stop = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    while True:
        # A file that is renamed between the listing and its stat is looked at the next time.
        with contextlib.suppress(FileNotFoundError):
            if taken(directory) > start:
                clean(directory, stop)
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
