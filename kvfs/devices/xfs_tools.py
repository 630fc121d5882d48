"""Runs the programs that devices need, mostly for XFS, with a time limit and one-line errors.

mkfs.xfs and xfs_logprint call stat(2) on all mounts (platform_check_mount of xfsprogs), and would
hang if the server of any FUSE mount hangs. So they run in a mount namespace without FUSE mounts.
"""

import contextlib
import ctypes
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvfs.core.errors import SourceBusy, SourceDamaged, ToolMissing
from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.machine.mount_table import MNT_DETACH, mounts
from kvfs.storage.syscalls import LIBC

#: The Debian package of each program.
_PACKAGES: Final = {
    "mkfs.xfs": "xfsprogs",
    "xfs_logprint": "xfsprogs",
    "blkid": "util-linux",
    "cryptsetup": "cryptsetup-bin",
    "systemd-cryptenroll": "systemd",
}
#: Daemons of root often have no sbin in PATH.
_SBIN: Final = "/usr/local/sbin:/usr/sbin:/sbin"
_END_WAIT_S: Final = 1.0


def find_tool(name: str) -> str:
    """Return the path of program *name*. Raises ToolMissing with its Debian package."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")
    if path is None:
        raise ToolMissing(f"{name} is not installed; apt install {_PACKAGES[name]}")
    return path


def run_tool(name: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run *name* in the C locale and return its output, whatever the exit code.

    Raises ToolMissing, and SourceDamaged when it does not finish within *timeout_s*.
    """
    program = find_tool(name)
    with without_fuse(program) as leave:
        tool = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            env={**os.environ, "LC_ALL": "C"},
            preexec_fn=leave,
        )
    assert tool.stdout is not None
    assert tool.stderr is not None
    with tool.stdout, tool.stderr:
        try:
            printed, complaint = tool.communicate(timeout=timeout_s)
        except BaseException as error:
            _end(tool)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise  # Ctrl-C
            target = arguments[-1]
            raise SourceDamaged(
                f"{target}: {name} did not finish in {timeout_s:.0f} s; does a mount on this "
                f"machine hang (df)?"
            ) from None
    return subprocess.CompletedProcess(tool.args, tool.returncode, printed, complaint)


def _end(tool: "subprocess.Popen[str]") -> None:
    """Kill *tool*. If it hangs in a stat(2) it cannot die, so do not wait for long."""
    tool.kill()
    try:
        tool.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        tool.returncode = -signal.SIGKILL  # otherwise Popen warns


def last_line(text: str) -> str:
    """Return the last line of a program's error output, for a message of one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


#: linux/sched.h, linux/mount.h.
_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_REASON_BYTES: Final = 256

_log: Final = logging.getLogger(__name__)


@contextlib.contextmanager
def without_fuse(program: str) -> Iterator[Callable[[], None] | None]:
    """Yield a preexec_fn that unmounts all FUSE mounts for *program*; None if there are none.

    Start the program inside the ``with`` block. The child unmounts in a mount namespace of its own,
    which sees unmounts from outside and does not propagate its own. If it may not have one (a
    unit's RestrictNamespaces=, no CAP_SYS_ADMIN), the program runs anyway, and the log says so.
    """
    mountpoints = {mount.mountpoint for mount in mounts() if _is_fuse(mount.fs_type)}
    # Except the one that holds the program itself.
    apart = [path for path in mountpoints if not f"{program}/".startswith(f"{path.rstrip('/')}/")]
    if not apart:
        yield None
        return
    # The outermost first: mounts inside go with it, so that no path through it is looked up.
    paths = [os.fsencode(path) for path in sorted(apart, key=len)]
    flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def leave() -> None:
        if LIBC.unshare(_CLONE_NEWNS) != 0 or LIBC.mount(None, b"/", None, flags, None) != 0:
            os.write(writing, os.strerror(ctypes.get_errno()).encode())
            return
        for path in paths:
            LIBC.umount2(path, MNT_DETACH)

    try:
        yield leave
    finally:
        with contextlib.suppress(BlockingIOError):  # the child writes only if something failed
            refusal = os.read(reading, _REASON_BYTES).decode()
            _log.warning(
                "%s gets no mount namespace of its own (%s): it looks at every mount of this "
                "machine, and hangs where a FUSE server does",
                program,
                refusal,
            )
        os.close(reading)
        os.close(writing)


def _is_fuse(fs_type: str) -> bool:
    return fs_type in ("fuse", "fuseblk") or fs_type.startswith(("fuse.", "fuseblk."))


#: ``log tail: 2 head: 8 state: <DIRTY>``, the third line of xfs_logprint(8).
_STATE: Final = re.compile(rb"state: <(\w+)>")
_HEAD_BYTES: Final = 4096
#: The answer takes milliseconds, unless a mount on this machine hangs.
_ANSWER_WAIT_S: Final = 20.0


def journal_is_dirty(block_path: str, source: str) -> bool:
    """Whether the XFS on *block_path* was cut off before an unmount: power, crash or failure.

    It must not be mounted. After the last fd, even of a killed process, the kernel unmounts it, and
    the log is clean. An answer that cannot be parsed counts as dirty. *source* is its name in
    messages. Raises ToolMissing, SourceBusy.
    """
    program = find_tool("xfs_logprint")
    # It is killed after its third line: then it would print the log, which may be gigabytes.
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a stat cannot die
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


# A note that the XFS of a pool was cut off, kept until RUN says so, in case a start is killed.
#
# The log recovery (in mount(2), for seconds) leaves a clean log. A process that is killed meanwhile
# ends only after it, without having emptied RUN. The note is in /run, which lasts until the next
# boot, like the page cache that RUN vouches for.


def note_cut_off(epoch: int) -> None:
    """Note that the pool with *epoch* was cut off; without /run there is no note."""
    with contextlib.suppress(OSError):
        os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
        os.close(os.open(_note_path(epoch), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def is_cut_off_noted(epoch: int) -> bool:
    """Whether an earlier start noted that, and ended before it changed RUN."""
    return os.path.exists(_note_path(epoch))


def forget_cut_off(epoch: int) -> None:
    """Remove the note, because RUN has it now."""
    with contextlib.suppress(OSError):
        os.unlink(_note_path(epoch))


def _note_path(epoch: int) -> str:
    return f"{RUN_DIRECTORY}/{epoch:016x}.cut-off"
