"""Kernel settings of the machine, as /proc/sys tells them."""

from typing import Final

_SYSCTL: Final = "/proc/sys"
#: For how long a request to a FUSE server may take, in s (0: no limit); since Linux 6.15. Over it
#: the kernel aborts the whole connection (fuse_check_timeout in fs/fuse/dev.c). The first holds if
#: the server names none at INIT, the second for all (init_server_timeout in fs/fuse/inode.c).
DEFAULT_REQUEST_TIMEOUT: Final = "fs.fuse.default_request_timeout"
MAX_REQUEST_TIMEOUT: Final = "fs.fuse.max_request_timeout"


def sysctl(name: str) -> int | None:
    """Return the number in setting *name*, such as vm.dirty_ratio; None: this kernel has none."""
    try:
        with open(f"{_SYSCTL}/{name.replace('.', '/')}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
