"""Programs that devices need, mostly for XFS: found, run with a bound, their failure in one line.

mkfs.xfs and xfs_logprint ask by stat(2) what is mounted where (platform_check_mount of xfsprogs),
and wait for as long as the server of any FUSE mount hangs: they run where none is mounted.
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
from kvfs.machine.mount_table import mounts
from kvfs.storage.syscalls import LIBC

#: The Debian package of each program.
_PACKAGES: Final = {"mkfs.xfs": "xfsprogs", "xfs_logprint": "xfsprogs", "blkid": "util-linux"}
#: root's daemons often have no sbin in PATH.
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
    """Kill it; one that hangs in a stat lives on, and is not waited for."""
    tool.kill()
    try:
        tool.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        tool.returncode = -signal.SIGKILL  # Popen would warn


def last_line(text: str) -> str:
    """Return the last line of a program's complaint, for a message of one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


#: linux/sched.h, linux/mount.h; umount(2).
_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_MNT_DETACH: Final = 2
_REASON_MAX_BYTES: Final = 256

_log: Final = logging.getLogger(__name__)


@contextlib.contextmanager
def without_fuse(program: str) -> Iterator[Callable[[], None] | None]:
    """Yield what a child does before it becomes *program*: it goes where no FUSE is mounted.

    None where nothing is to be done. In the child's own mount namespace, which gets what is
    unmounted outside and tells nothing of what is unmounted in it. Where it may not have one (a
    unit's RestrictNamespaces=, no CAP_SYS_ADMIN) the program runs all the same, and the log says
    so: start it inside.
    """
    mountpoints = {mount.mountpoint for mount in mounts() if _is_fuse(mount.fs_type)}
    # Not what the program itself lies on.
    apart = [path for path in mountpoints if not f"{program}/".startswith(f"{path.rstrip('/')}/")]
    if not apart:
        yield None
        return
    # The outermost first: what is mounted in it goes along, and is not walked to.
    paths = [os.fsencode(path) for path in sorted(apart, key=len)]
    flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def leave() -> None:
        if LIBC.unshare(_CLONE_NEWNS) != 0 or LIBC.mount(None, b"/", None, flags, None) != 0:
            os.write(writing, os.strerror(ctypes.get_errno()).encode())
            return
        for path in paths:
            LIBC.umount2(path, _MNT_DETACH)

    try:
        yield leave
    finally:
        with contextlib.suppress(BlockingIOError):  # it says nothing where all went well
            refusal = os.read(reading, _REASON_MAX_BYTES).decode()
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


# A note that the XFS of a pool was cut off, kept until RUN says so, in case a start is killed.
#
# The log's recovery (mount(2), seconds of it) leaves a clean log behind, and a process that is
# killed meanwhile ends with it, before it could empty RUN. The note lies in /run, which lasts as
# long as the boot whose page cache RUN vouches for.


def note_cut_off(epoch: int) -> None:
    """Remember that the pool with *epoch* was cut off; without a place for that, nothing."""
    with contextlib.suppress(OSError):
        os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
        os.close(os.open(_note_path(epoch), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def is_cut_off_noted(epoch: int) -> bool:
    """Whether a start that was to tell RUN of it has not come so far."""
    return os.path.exists(_note_path(epoch))


def forget_cut_off(epoch: int) -> None:
    """RUN says it now."""
    with contextlib.suppress(OSError):
        os.unlink(_note_path(epoch))


def _note_path(epoch: int) -> str:
    return f"{RUN_DIRECTORY}/{epoch:016x}.cut-off"
