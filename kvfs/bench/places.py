"""Where a directory lies: its mountpoint and the type of the file system there. Pure."""

import re
from typing import NamedTuple


class Mount(NamedTuple):
    """One line of ``/proc/self/mountinfo``, as far as it matters here."""

    mountpoint: str
    fs_type: str


def find_mount(path: str, mountinfo: str) -> Mount:
    """Return the mount that the absolute *path* lies on, given the text of mountinfo.

    proc_pid_mountinfo(5): the fifth field is the mountpoint with blanks in octal, the type follows
    the lone dash; of mounts on one point the last is on top.
    """
    found = Mount("/", "unknown")
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        mountpoint = _unescape(fields[4])
        inside = path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")
        if inside and len(mountpoint) >= len(found.mountpoint):
            found = Mount(mountpoint, fields[fields.index("-") + 1])
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
