"""A kernel without MOVE_MOUNT_BENEATH (before Linux 6.5), for programs started through here.

``python old_kernel.py COMMAND...`` runs COMMAND under a seccomp filter (seccomp(2)): move_mount(2)
with that flag is EINVAL, as there.
"""

import ctypes
import errno
import os
import struct
import sys
from typing import Final

#: What goes before a command.
WITHOUT_BENEATH: Final = (sys.executable, __file__)

_MOVE_MOUNT: Final = 429
_BENEATH: Final = 0x200
_FLAGS_ARGUMENT: Final = 16 + 8 * 4  # struct seccomp_data: nr, arch, ip, then the arguments
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_LOAD, _EQUAL, _HAS, _RETURN = 0x20, 0x15, 0x45, 0x06  # linux/bpf_common.h


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _refuse_beneath() -> None:
    steps = [
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 3, _MOVE_MOUNT),
        (_LOAD, 0, 0, _FLAGS_ARGUMENT),
        (_HAS, 0, 1, _BENEATH),
        (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), code)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    _refuse_beneath()
    os.execvp(sys.argv[1], sys.argv[1:])
