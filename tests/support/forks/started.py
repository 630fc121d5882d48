"""In a fork: the programs of this tree that it starts are forks as well.

``kvfs mount`` starts a supervisor, which starts servers; a command starts one that looks. They do
so by ``subprocess``, ``os.posix_spawn`` and ``os.execve``, which here fork where a fork can do it.
"""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from tests.support.forks.becoming import become, blocked_signals, fork
from tests.support.forks.orders import Order
from tests.support.forks.programs import Program, program_of, read_at_start

_BORN: Final = read_at_start(os.environ)
_posix_spawn: Final = os.posix_spawn
_execve: Final = os.execve


def fork_what_it_starts() -> None:
    """Put forks in the place of new interpreters, for all that this process starts."""
    subprocess.Popen = Started  # type: ignore[misc]
    os.posix_spawn = _spawned  # type: ignore[assignment]
    os.execve = _replaced  # type: ignore[assignment]


def _for_a_fork(
    words: Sequence[str], directory: str, environment: Mapping[str, str]
) -> Program | None:
    # A lock that another thread holds would stay locked for ever in the fork.
    if threading.active_count() > 1 or not all(isinstance(word, str) for word in words):
        return None
    try:
        program = program_of(words, directory or os.getcwd())
    except FileNotFoundError:
        return None
    return program if read_at_start(environment) == _BORN else None


class Started(subprocess.Popen[Any]):
    """A process that was forked, if it can be, and else started by exec."""

    # Popen's own method, which no document names (orders.py).
    def _execute_child(self, *given: object) -> None:
        order = Order.of(given)
        program = order and _for_a_fork(order.words, order.directory, order.environment)
        if order is None or program is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return

        def first() -> None:
            if order.new_session:
                os.setsid()
            if order.directory:
                os.chdir(order.directory)

        with blocked_signals() as mask:
            self.pid = fork(program, order.environment, order.streams, first, mask)
            self._child_created = True
        self._close_pipe_fds(*order.pipes)  # type: ignore[attr-defined]


def _spawned(
    path: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    /,
    **more: Any,  # noqa: ANN401
) -> int:
    """``os.posix_spawn``; of what it can do, *setpgroup* is what the supervisor asks for."""
    program = None if set(more) - {"setpgroup"} else _for_a_fork(words, "", environment)
    if program is None or path != words[0]:
        return _posix_spawn(path, list(words), environment, **more)

    def first() -> None:
        if "setpgroup" in more:
            os.setpgid(0, more["setpgroup"])

    with blocked_signals() as mask:
        return fork(program, environment, None, first, mask)


def _replaced(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """``os.execve``: the process stays, and becomes the other program."""
    program = _for_a_fork(words, "", environment)
    if program is None or path != words[0]:
        _execve(path, list(words), environment)
    with blocked_signals() as mask:
        become(program, environment, None, mask)
