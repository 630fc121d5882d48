"""Checks that a command is run with the rights that it needs."""

import os
from typing import Final

from kvfs.core.errors import NotRoot

#: linux/capability.h.
_CAP_SYS_ADMIN: Final = 21
#: linux/proc_ns.h, PROC_USER_INIT_INO. Root of another user namespace is not root of the machine.
_FIRST_USER_NAMESPACE: Final = 0xEFFFFFFD


def need_root(what: str) -> None:
    """Raise NotRoot unless we are root with CAP_SYS_ADMIN, which a container may lack."""
    if os.geteuid() != 0:
        raise NotRoot(f"{what} needs root")
    if not _may_administer():
        raise NotRoot(
            f"{what} needs root with CAP_SYS_ADMIN, which this process does not have: give it to "
            "the container, and use no user namespace"
        )


def _may_administer() -> bool:
    """Whether we have CAP_SYS_ADMIN of the machine itself; True if /proc does not tell."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
            held = [int(line.split()[1], 16) for line in status if line.startswith("CapEff:")]
        namespace = os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return True
    return namespace == _FIRST_USER_NAMESPACE and all(mask >> _CAP_SYS_ADMIN & 1 for mask in held)
