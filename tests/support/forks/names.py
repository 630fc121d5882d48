"""What /proc tells of a process as exec would have it: its name, command line and environment."""

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvfs.storage.syscalls import LIBC, raise_errno

#: linux/prctl.h. With the whole map no capability is asked for (prctl(2)).
_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
#: Fields of /proc/PID/stat, counted from 1 (proc(5)), by what struct prctl_mm_map calls them.
_FIELDS: Final = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}
#: An exe_fd and an auxv_size that leave both as they are.
_NO_FD: Final = 0xFFFFFFFF
_kept: list[mmap.mmap] = []


class _Map(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk"),
                *("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    )


def take_name(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let /proc tell the command line *words* and the *environment* of this process.

    Raises OSError where the kernel was built without CONFIG_CHECKPOINT_RESTORE.
    """
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = (f"{name}={text}" for name, text in environment.items())
    text = line + b"".join(os.fsencode(variable) + b"\0" for variable in variables)
    memory = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    _kept.append(memory)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    LIBC.sbrk.restype = ctypes.c_void_p
    told = _Map(
        **{name: int(stat[field - 3]) for name, field in _FIELDS.items()},
        arg_start=start,
        arg_end=start + len(line),
        env_start=start + len(line),
        env_end=start + len(text),
        exe_fd=_NO_FD,
    )
    told.brk = LIBC.sbrk(ctypes.c_long(0))
    numbers = (ctypes.sizeof(told), 0)
    if LIBC.prctl(
        _PR_SET_MM,
        ctypes.c_ulong(_PR_SET_MM_MAP),
        ctypes.byref(told),
        *(ctypes.c_ulong(number) for number in numbers),
    ):
        raise_errno("/proc/self/cmdline")
    Path("/proc/self/comm").write_text(os.path.basename(words[0]))
