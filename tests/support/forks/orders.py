"""What is ordered when a process is started: what ``Popen`` was asked for, where that is usual."""

import ctypes
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvfs.storage.syscalls import LIBC

_PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
#: Of ``Popen._execute_child`` of Python 3.11 to 3.13, which no document names.
_PARAMETERS: Final = (
    *("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env"),
    *("startupinfo", "creationflags", "shell", *_PIPES, "restore_signals"),
    *("gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)
_USUAL: Final[Mapping[str, object]] = {
    **dict.fromkeys(("executable", "preexec_fn", "gid", "gids", "uid")),
    **dict.fromkeys(("close_fds", "restore_signals"), True),
    **dict.fromkeys(("umask", "process_group"), -1),
    "shell": False,
}


class Order(NamedTuple):
    """A process that is to be started."""

    words: tuple[str, ...]
    directory: str
    """Where it works, an absolute path; "" for where its parent does."""
    environment: dict[str, str]
    new_session: bool
    streams: dict[int, int]
    """Its descriptors, each with the one of its parent that it is a copy of."""
    pipes: tuple[int, ...]
    """What ``Popen._close_pipe_fds`` wants."""

    @classmethod
    def of(cls, given: Sequence[Any]) -> "Order | None":
        """Return what the parameters of ``Popen._execute_child`` order, or None.

        A parameter that came later, or has another value than the usual, is a case for exec.
        """
        if len(given) != len(_PARAMETERS):
            return None
        named = dict(zip(_PARAMETERS, given, strict=True))
        usual = all(named[name] == value for name, value in _USUAL.items())
        words = named["args"]
        if not usual or isinstance(words, str | bytes | os.PathLike):
            return None
        theirs = (named["p2cread"], named["c2pwrite"], named["errwrite"])
        streams = {number: number if fd == -1 else fd for number, fd in enumerate(theirs)}
        environment = _environment() if named["env"] is None else named["env"]
        return cls(
            tuple(os.fsdecode(word) for word in words),
            "" if named["cwd"] is None else os.path.abspath(os.fsdecode(named["cwd"])),
            {os.fsdecode(name): os.fsdecode(text) for name, text in environment.items()},
            bool(named["start_new_session"]),
            streams | {int(fd): int(fd) for fd in named["pass_fds"]},
            tuple(named[name] for name in _PIPES),
        )


def _environment() -> dict[bytes, bytes]:
    """Return what exec hands on: the C library's, in which readline has its own COLUMNS."""
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(LIBC, "environ")
    found = {}
    # Up to the null pointer that ends it (environ(7)).
    for variable in itertools.takewhile(bool, (variables[at] for at in itertools.count())):
        name, _, text = variable.partition(b"=")
        found[name] = text
    return found
