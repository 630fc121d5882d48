"""System calls of a store that serves, whose loop must not wait for the device."""

import contextlib
import errno
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from kvfs.storage.syscalls import Syscalls

P = ParamSpec("P")
R = TypeVar("R")
_HELD_MAX_S: Final = 300.0
#: Held or failing, if nothing else is said: calls for any file.
_ANYWHERE: Final = Path("/")
#: What the kernel answers from memory; the index of these stores is in memory, too.
_HARMLESS: Final = frozenset(
    {"fstat", "fcntl", "lseek", "statvfs", "reopen", "commit", "check_alive"}
)
#: One that is below, and one that is made of others.
_NOT_WATCHED: Final = frozenset({"open_cached", "pwrite_all"})


class LoopGuard(Syscalls):
    """Notes each call on the loop's thread that may wait for the device, while a store serves."""

    def __init__(self) -> None:
        #: What was called, and by whom.
        self.seen: list[str] = []
        self._loop: int | None = None
        #: Whether a call is held.
        self.waits = False
        #: The extents that the kernel has in memory; None: all.
        self._cached: set[object] | None = None
        #: Whether openat2(2) is refused, as by seccomp, so that nobody can ask what is in memory.
        self.openat2_refused = False
        self._held: frozenset[str] = frozenset()
        self._failing: frozenset[str] = frozenset()
        self._error_no = errno.EIO
        self._below = _ANYWHERE
        self._answers = threading.Event()
        for name in dir(Syscalls):
            if not name.startswith("_") and name not in _NOT_WATCHED:
                setattr(self, name, self._watched(name, getattr(self, name)))

    def watch(self) -> None:
        """From now on this thread is the loop's."""
        self._loop = threading.get_ident()

    def rest(self) -> None:
        """No loop serves any more."""
        self._loop = None

    def chill(self) -> None:
        """Let the kernel have no extent in memory: each is read from the device once."""
        self._cached = set()

    @contextlib.contextmanager
    def held(self, *names: str, below: Path = _ANYWHERE) -> Iterator[None]:
        """Let the drive *below* which files lie not answer the calls *names*, meanwhile."""
        self._answers.clear()
        self._held, self._below = frozenset(names), below
        try:
            yield
        finally:
            self._held = frozenset()
            self._answers.set()

    @contextlib.contextmanager
    def failing(
        self,
        *names: str,
        error_no: int = errno.EIO,
        below: Path = _ANYWHERE,
    ) -> Iterator[None]:
        """Let the calls *names* for files *below* fail in all threads, meanwhile."""
        self._failing, self._error_no, self._below = frozenset(names), error_no, below
        try:
            yield
        finally:
            self._failing = frozenset()

    def _watched(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            on_loop = threading.get_ident() == self._loop
            if on_loop and not (self._waits_not(name, args) or _is_in_memory(args, kwargs)):
                self.seen.append(f"{name}: {_caller()}")
            if name in self._held and not on_loop and self._concerns(args, kwargs):
                self.waits = True
                assert self._answers.wait(_HELD_MAX_S), f"{name} is held for ever"
                self.waits = False
            if name in self._failing and self._concerns(args, kwargs):
                raise OSError(self._error_no, os.strerror(self._error_no))
            try:
                return call(*args, **kwargs)
            finally:
                if name == "open" and self._cached is not None:
                    self._cached.add(args[0])  # or that there is no such file

        return watched

    def open_cached(self, name: str, flags: int, *, dir_fd: int) -> int:
        """Do as the kernel does that has in memory only what was opened since ``chill``."""
        if "open_cached" in self._failing and self._concerns((name,), {"dir_fd": dir_fd}):
            raise OSError(self._error_no, os.strerror(self._error_no))
        if self.openat2_refused:
            return -1
        if self._cached is not None and name not in self._cached:
            return -1
        return super().open_cached(name, flags, dir_fd=dir_fd)

    def _concerns(self, args: tuple[object, ...], named: Mapping[str, object]) -> bool:
        """Whether a call with such arguments is for the drive that is held, or fails."""
        return _place(args, named).is_relative_to(self._below)

    def _waits_not(self, name: str, args: tuple[object, ...]) -> bool:
        if name in _HARMLESS:
            return True
        flags = args[3] if name in ("preadv", "pwritev") and len(args) > 3 else 0
        return isinstance(flags, int) and bool(flags & os.RWF_NOWAIT)


def _place(args: tuple[object, ...], named: Mapping[str, object]) -> Path:
    """Return the file, or its directory, that a call with such arguments is for."""
    where = named.get("dir_fd", named.get("src_dir_fd", args[0]))
    path = f"/proc/self/fd/{where}" if isinstance(where, int) else str(where)
    return Path(os.path.realpath(path))


def _is_in_memory(args: tuple[object, ...], named: Mapping[str, object]) -> bool:
    """Whether a call is for an extent in memory, beside the index."""
    return bool(args) and "blocks" in _place(args, named).parts


def _caller() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/kvfs/" in frame.filename]
    return " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-4:]))
