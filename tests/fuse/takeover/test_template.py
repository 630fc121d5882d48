"""The process of which servers are forked: what they inherit, and what its own death means."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounts.mounting import ROOT
from tests.support.mounts.supervisor_alone import (
    DIE,
    HOLD,
    supervised,
    supervisor_stopped,
    template_of,
)

#: What a server would have of its own if it were a new interpreter. The numbers of its own files,
#: of the test's and of what it looks with are left out.
STATE: Final = """
fds = set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, held.fileno(), test.fileno()}
fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
handlers = [str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (1, 15)]
umask = os.umask(0o22)
import random
test.send(json.dumps({
    "files": sorted(fd.split(":")[0] for fd in fds), "cwd": os.getcwd(), "umask": umask,
    "parent": os.getppid(), "threads": len(os.listdir("/proc/self/task")),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "handlers": handlers,
    "children": open("/proc/thread-self/children").read(),
    "name": open("/proc/self/comm").read(), "random": random.random(),
}).encode())
"""


def test_nothing_of_its_template_shows_in_a_server(tmp_path: Path) -> None:
    fresh = subprocess.run(
        [sys.executable, "-c", "import signal\nfor n in signal.valid_signals():\n"
         " if n not in (1, 15): print(signal.getsignal(n))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with supervised(tmp_path) as one:
        first = one.told()
        states = []
        for _ in range(2):
            one.tell(HOLD)
            one.tell(STATE, answers=False)
            states.append(one.told())
            assert one.told() == "done"
            one.tell(DIE, answers=False)
            one.told()
        drawn = [state.pop("random") for state in states]
        assert drawn[0] != drawn[1]
        for state in states:
            assert state.pop("parent") == one.process.pid
            assert template_of(one) != first["pid"]
            files = state.pop("files")
            # What the test has given to all, and what this server was told to hold, and was given.
            assert [file for file in files if not file.startswith("/")] == ["socket"], files
            assert state == {
                "cwd": "/",
                "umask": 0o22,
                "threads": 1,
                "mask": [],
                "handlers": fresh.stdout.splitlines(),
                "children": "",
                "name": f"{Path(sys.executable).name}\n",
            }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_template_that_is_dead_or_stopped_is_replaced(tmp_path: Path, number: int) -> None:
    """While a server serves, and when it is needed."""
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        before = template_of(one)
        os.kill(before, number)
        another = template_of(one, before)
        with supervisor_stopped(one):
            os.kill(another, number)
            one.tell(DIE, answers=False)
        assert one.told()["given"].keys() == {"fuse", "abort"}
        one.tell(HOLD)
        assert "kvfs.supervisor: the process of which servers are forked: it was " in one.log()


#: Prints the names of all modules after the imports of a template, and the number of its threads.
IMPORTS: Final = """
import json, os, sys
import kvfs.cli.main, kvfs.cli.mount, kvfs.cli.serve, mount.process.template
kvfs.cli.serve.import_all()
print(json.dumps([sorted(sys.modules), len(os.listdir("/proc/self/task"))]))
"""
#: Of the command that starts a server, and prints.
NOT_A_SERVERS: Final = frozenset({"rich.table", "rich.console", "rich.text", "rich.progress"})


def imported_late(path: Path) -> set[str]:
    """Return the modules that functions of *path* import."""
    found: set[str] = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                found.add(node.module)
                for name in (f"{node.module}.{name.name}" for name in node.names):
                    if (ROOT / name.replace(".", "/")).with_suffix(".py").exists():
                        found.add(name)
    return found


def test_a_template_has_imported_all_that_its_servers_may_need_and_has_no_thread() -> None:
    """Else a server would take a part of a version that was installed over its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    modules, threads = json.loads(done.stdout)
    assert threads == 1
    missing = {}
    for module in modules:
        if module.startswith(("kvfs", "mount")):
            path = ROOT / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file.with_suffix(".pyx").exists():
                continue  # compiled: all its imports are made at once
            if late := imported_late(file) - set(modules) - NOT_A_SERVERS:
                missing[module] = late
    assert missing == {}
