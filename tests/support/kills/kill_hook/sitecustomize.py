"""Ends a kvfs server by SIGKILL inside a named function, when a test says so.

Python imports a module of this name at its start. A test puts this folder on the server's
PYTHONPATH and names a file in ``KVFS_TEST_KILL_ORDER``; into that it writes which kind of request,
and which moment of it, is to be the server's last (``tests/support/kills/kill_order.py``).
"""

import importlib.abc
import importlib.machinery
import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Bytes of the order file: kind of request, moment of it, whether a server has died of it.
KIND, MOMENT, FIRED = 0, 1, 2
CREATE, RENAME, RELEASE = 1, 2, 3
BEGIN, BEFORE_COMMIT, AFTER_COMMIT, END = 1, 2, 3, 4

Method = Callable[..., Any]


class _Order:
    """What the test wants, looked at in each such request."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        #: The kind of the request whose answer is being made.
        self.present = 0

    def reached(self, moment: int) -> None:
        memory = self.memory
        if memory[KIND] == self.present != 0 and memory[MOMENT] == moment:
            memory[FIRED] = 1
            os.kill(os.getpid(), signal.SIGKILL)

    def request(self, kind: int, method: Method) -> Method:
        """Return *method*, which answers requests of this kind, with its moments."""

        def answer(*arguments: object) -> object:
            self.present = kind
            try:
                self.reached(BEGIN)
                answered = method(*arguments)
                self.reached(END)
            finally:
                self.present = 0
            return answered

        return answer

    def commit(self, method: Method) -> Method:
        def commit(*arguments: object) -> object:
            self.reached(BEFORE_COMMIT)
            done = method(*arguments)
            self.reached(AFTER_COMMIT)
            return done

        return commit


class _Patched(importlib.abc.Loader):
    """Loads a module as its own loader does, and then changes it."""

    def __init__(self, loader: importlib.abc.Loader, change: Callable[[ModuleType], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have such functions."""

    def __init__(self, order: _Order) -> None:
        self._order = order
        self._changes = {
            "mount.requests.fast": self._change_answers,
            "kvfs.storage.syscalls": self._change_commit,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patched(spec.loader, change)
        return spec

    def _change_answers(self, module: ModuleType) -> None:
        answers = module.FastAnswers
        for kind, name in ((CREATE, "_create"), (RENAME, "_move"), (RELEASE, "_release")):
            setattr(answers, name, self._order.request(kind, getattr(answers, name)))

    def _change_commit(self, module: ModuleType) -> None:
        module.Syscalls.commit = self._order.commit(module.Syscalls.commit)


if _path := os.environ.get("KVFS_TEST_KILL_ORDER"):
    sys.meta_path.insert(0, _Finder(_Order(_path)))
