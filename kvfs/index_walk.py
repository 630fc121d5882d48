"""Read every row of an index, in a process of its own: ``python -m kvfs.index_walk PATH``.

LMDB answers some damage with SIGABRT or SIGBUS; fsck must live to tell of it.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvfs.errors import CommandError, Damaged, FormatUnknown, IndexDamaged
from kvfs.index import Index
from kvfs.index_place import index_path

_STEP_ROWS: Final = 4096
_DAMAGED_EXIT: Final = IndexDamaged.exit_code
_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[1])


def refuse_unreadable(pool_fd: int) -> None:
    """Raise IndexDamaged or FormatUnknown unless every row of the pool's index can be read."""
    child = subprocess.run(
        [sys.executable, "-m", __name__, index_path(pool_fd)],
        pass_fds=[pool_fd],
        env={**os.environ, "PYTHONPATH": _PACKAGE_ROOT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == 0:
        return
    if child.returncode < 0:
        raise IndexDamaged(f"index: reading it ends in {signal.Signals(-child.returncode).name}")
    text = child.stderr.strip().rpartition("\n")[2]
    raise FormatUnknown(text) if child.returncode == FormatUnknown.exit_code else IndexDamaged(text)


def walk(path: str) -> int:
    """Read all rows of the index in *path*; return how many. Raises Damaged, CommandErrors."""
    count = 0
    with Index(path, read_only=True) as index:
        after = b""
        while rows := index.rows(b"", after, _STEP_ROWS):
            after = rows[-1][0]
            count += len(rows)
    return count


def main(path: str) -> int:
    """Walk; return the exit code that ``refuse_unreadable`` understands."""
    try:
        walk(path)
    except (CommandError, Damaged, OSError) as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else _DAMAGED_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
