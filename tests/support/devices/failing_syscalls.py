"""Syscalls whose n-th call of the chosen names fails: the seam for injected EIO and ENOSPC."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from kvfs.storage.syscalls import Syscalls

P = ParamSpec("P")
T = TypeVar("T")


class FailingSyscalls(Syscalls):
    """Fails call number *fail_at* (from 1; 0: none) among *names*, once, or from there on.

    ``calls`` counts the calls of *names* so far, ``failed`` those that were refused: run the
    scenario once with ``fail_at=0`` to learn the count, then once for every n up to it.
    """

    def __init__(
        self,
        names: Iterable[str],
        fail_at: int = 0,
        error_no: int = errno.EIO,
        *,
        for_good: bool = False,
    ) -> None:
        self.fail_at = fail_at
        self.error_no = error_no
        self.for_good = for_good
        self.calls = 0
        self.failed = 0
        self.paused = False
        for name in names:
            setattr(self, name, self._counted(getattr(self, name)))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let every call through, uncounted: to look at what the failures led to."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _counted(self, call: Callable[P, T]) -> Callable[P, T]:
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            if self.paused:
                return call(*args, **kwargs)
            self.calls += 1
            due = self.calls >= self.fail_at if self.for_good else self.calls == self.fail_at
            if self.fail_at and due:
                self.failed += 1
                raise OSError(self.error_no, os.strerror(self.error_no))
            return call(*args, **kwargs)

        return counted
