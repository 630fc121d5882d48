"""Whether an XFS was cut off: its log tells, as long as nobody has mounted it again."""

import contextlib
import os
import re
import select
import subprocess
import time
from typing import Final

from kvfs.core.errors import SourceBusy
from kvfs.devices.apart import without_fuse
from kvfs.devices.tools import find_tool

#: ``log tail: 2 head: 8 state: <DIRTY>``, the third line of xfs_logprint(8).
_STATE: Final = re.compile(rb"state: <(\w+)>")
_HEAD_BYTES: Final = 4096
#: It takes milliseconds, unless a mount of this machine hangs.
_ANSWER_WAIT_S: Final = 20.0


def journal_is_dirty(block_path: str, source: str) -> bool:
    """Whether the XFS on *block_path*, not mounted now, was not unmounted: power, crash, failure.

    The kernel unmounts after the last fd even of a killed process, and then the log is clean. An
    answer that nobody understands counts as dirty. *source* is its name in messages. Raises
    ToolMissing, SourceBusy.
    """
    program = find_tool("xfs_logprint")
    # Behind its third line it prints the log, gigabytes of it if it may.
    with without_fuse(program) as leave:
        tool = subprocess.Popen(
            [program, "-t", block_path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            preexec_fn=leave,
        )
    assert tool.stdout is not None
    try:
        with tool.stdout:
            head = _read_head(tool.stdout.fileno(), source)
    finally:
        tool.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a stat lives on
            tool.wait(1.0)
    state = _STATE.search(head)
    return state is None or state[1] != b"CLEAN"


def _read_head(fd: int, source: str) -> bytes:
    deadline_s = time.monotonic() + _ANSWER_WAIT_S
    head = b""
    while len(head) < _HEAD_BYTES:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise SourceBusy(
                f"{source}: no answer from xfs_logprint in {_ANSWER_WAIT_S:g} s; does a mount "
                f"on this machine hang (df)?"
            )
        part = os.read(fd, _HEAD_BYTES)
        if not part:
            break
        head += part
    return head
