"""Programs of the system that devices need: found, run with a bound, their failure in one line."""

import os
import shutil
import subprocess
from typing import Final

from kvfs.devices.apart import without_fuse
from kvfs.errors import SourceDamaged, ToolMissing

#: The Debian package of each program.
_PACKAGES: Final = {"mkfs.xfs": "xfsprogs", "xfs_logprint": "xfsprogs", "blkid": "util-linux"}
#: root's daemons often have no sbin in PATH.
_SBIN: Final = "/usr/local/sbin:/usr/sbin:/sbin"


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
    try:
        return subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=timeout_s,
            check=False,
            preexec_fn=without_fuse(program),
        )
    except subprocess.TimeoutExpired:
        target = arguments[-1]
        raise SourceDamaged(f"{target}: {name} did not finish in {timeout_s:.0f} s") from None


def last_line(text: str) -> str:
    """Return the last line of a program's complaint, for a message of one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
