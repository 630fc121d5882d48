"""Programs of the system that devices need: found, run with a bound, their failure in one line."""

import os
import shutil
import signal
import subprocess
from typing import Final

from kvfs.core.errors import SourceDamaged, ToolMissing
from kvfs.devices.apart import without_fuse

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
