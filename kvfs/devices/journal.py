"""Whether an XFS was cut off: its log tells, as long as nobody has mounted it again."""

import os
import re
import subprocess
from typing import Final

from kvfs.devices.tools import find_tool

#: ``log tail: 2 head: 8 state: <DIRTY>``, the third line of xfs_logprint(8).
_STATE: Final = re.compile(rb"state: <(\w+)>")
_HEAD_BYTES: Final = 4096


def journal_is_dirty(block_path: str) -> bool:
    """Whether the XFS on *block_path*, not mounted now, was not unmounted: power, crash, failure.

    The kernel unmounts after the last fd even of a killed process, and then the log is clean. An
    answer that nobody understands counts as dirty. Raises ToolMissing.
    """
    # Behind its third line it prints the log, gigabytes of it if it may.
    with subprocess.Popen(
        [find_tool("xfs_logprint"), "-t", block_path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    ) as tool:
        assert tool.stdout is not None
        head = tool.stdout.read(_HEAD_BYTES)
        tool.kill()
    state = _STATE.search(head)
    return state is None or state[1] != b"CLEAN"
