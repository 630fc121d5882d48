"""A program that a fork becomes is as one that exec has started (tests/support/forks)."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.clients.stepping import until
from tests.support.forks.process import PARENT, Process, run
from tests.support.mounts.mounting import KVFS, ROOT, run_kvfs

#: Says all that a process can know of how it was started.
LOOKS: Final = """
import json, os, resource, signal, sys, threading
from pathlib import Path
here = Path("/proc/self")
def name(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return None
def of_stream(number):
    stream = (sys.stdin, sys.stdout, sys.stderr)[number]
    original = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    return stream and [stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines,
        stream.line_buffering, stream.write_through, stream is original]
status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
fds = {int(fd): name(fd) for fd in os.listdir(here / "fd") if name(fd)}
told = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "main": __name__,
    "cmdline": (here / "cmdline").read_bytes().hex(),
    "environ": (here / "environ").read_bytes().decode().split(chr(0)),
    "comm": (here / "comm").read_text(),
    "exe": os.readlink(here / "exe"),
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "umask": os.umask(0),
    "status": {key: status[key] for key in status if key.startswith(("Sig", "Shd", "Cap", "Uid",
        "Gid", "Groups", "NoNew", "Seccomp", "Threads", "Cpus_allowed")) and key != "SigQ"},
    "handlers": {number: str(signal.getsignal(number)).split(" at 0x")[0]
        for number in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "limits": [resource.getrlimit(number) for number in range(16)],
    "fds": {fd: name for fd, name in fds.items() if not name.startswith("/proc/")},
    "inheritable": {fd: os.get_inheritable(fd) for fd in fds if fd < 3 and name(fd)},
    "streams": [of_stream(number) for number in range(3)],
    "leads_session": os.getsid(0) == os.getpid(),
    "session": os.getsid(0) != os.getpid() and os.getsid(0),
    "group": os.getpgrp() != os.getpid() and os.getpgrp(),
    "threads": threading.active_count(),
    "flags": str(sys.flags).replace("safe_path=True", "safe_path=False"),  # read by nobody
    "warnings": sys.warnoptions,
}
"""
TELLS: Final = LOOKS + "open(sys.argv[1], 'w').write(json.dumps(told))"
Start = Callable[..., Any]


def told_by(start: Start, place: Path, **more: object) -> dict[str, Any]:
    """Return what the program says when it is started by *start*."""
    path = place / "told"
    start([sys.executable, "-c", TELLS, str(path), "an argument", ""], check=True, **more)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module", autouse=True)
def sigio_is_not_ignored() -> Iterator[None]:
    """As when this process began: a test may have made extents since (``standing``)."""
    before = signal.signal(signal.SIGIO, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGIO, before)


@contextlib.contextmanager
def forks_only() -> Iterator[None]:
    """Fail if anything is started by exec inside the block."""
    before = PARENT.forked
    yield
    assert PARENT.forked > before, "it was started by exec"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cwd": "/"},
        {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        {"capture_output": True, "start_new_session": True},
        {"env": {"A": "1", "HOME": "/x y", **{k: v for k, v in os.environ.items() if k < "P"}}},
    ],
)
def test_a_fork_is_as_a_new_interpreter(tmp_path: Path, how: dict[str, Any]) -> None:
    given = {**how}
    if "env" in how:  # what Python heeds stays as it is, or exec does it
        given["env"] = how["env"] | {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
    with forks_only():
        forked = told_by(run, tmp_path, **given)
    executed = told_by(subprocess.run, tmp_path, **given)
    # A pipe has another number each time.
    for told in (forked, executed):
        told["fds"] = {fd: name.partition(":")[0] for fd, name in told["fds"].items()}
    assert forked == executed


def test_descriptors_are_those_asked_for(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as kept, (tmp_path / "other").open("w") as other:
        os.set_inheritable(other.fileno(), True)  # and yet not of the new process: close_fds
        fds = (kept.fileno(),)
        with forks_only():
            forked = told_by(run, tmp_path, pass_fds=fds)
        assert forked["fds"] == told_by(subprocess.run, tmp_path, pass_fds=fds)["fds"]
        assert str(tmp_path / "file") in forked["fds"].values()


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "raise SystemExit",
        "raise SystemExit(70)",
        "raise SystemExit(256 + 3)",
        "raise SystemExit('a reason')",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
        "raise KeyboardInterrupt",
        "import os; os.abort()",
        "def f():\n    raise ValueError('wrong')\nf()",
        "print('to stdout'); import sys; sys.stderr.write('to stderr')",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import threading; threading.Timer(0.01, print, ('in a thread',)).start(); print('main')",
        "import logging; logging.warning('logged')",
        "import sys; sys.stdout = open('/dev/full', 'w'); print('x')",
        "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost')",
        "import sys; print(sys.stdin.read())",
        "import os; os.close(0); os.close(1); os.close(2); raise SystemExit(5)",
        "import subprocess as s; print(s.run(['sh', '-c', 'echo $0 $A; exit 3'], env={'A':'b'}))",
        "import os; print(os.fork() and os.wait()[1])",
    ],
)
def test_it_ends_as_one(code: str) -> None:
    """Exit code or signal, and each byte that it printed."""
    command = [sys.executable, "-c", code]
    with forks_only():
        forked = run(command, capture_output=True, input=b"given")
    executed = subprocess.run(command, capture_output=True, input=b"given", check=False)
    assert (forked.returncode, forked.stdout) == (executed.returncode, executed.stdout)
    assert forked.stderr == executed.stderr


@pytest.mark.parametrize(
    "verb", [["--version"], ["fsck", "/none"], ["nonsense"], ["help", "mount"]]
)
def test_a_command_answers_as_one(verb: Sequence[str]) -> None:
    with forks_only():
        forked = run_kvfs(*verb, check=False)
    with PARENT.by_exec():
        executed = run_kvfs(*verb, check=False)
    assert (forked.returncode, forked.stdout) == (executed.returncode, executed.stdout)
    assert forked.stderr == executed.stderr


def test_who_waits_sees_its_end_as_of_a_child(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    with forks_only(), Process(command, stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        # Its number is nobody else's before its end was seen.
        until(lambda: process_state(process.pid) == "Z", "it has died")
        assert process.wait() == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
        until(lambda: process_state(process.pid) is None, "it is reaped")


def process_state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.parametrize(
    "command",
    [
        ["unshare", "--mount", *KVFS, "--version"],
        ["env", "-i", *KVFS, "--version"],
        [sys.executable, "-I", *KVFS[1:], "--version"],
        [sys.executable, "-X", "utf8", *KVFS[1:], "--version"],
        ["true"],
    ],
)
def test_another_command_line_is_executed(command: list[str]) -> None:
    before = PARENT.forked
    assert run(command, capture_output=True, cwd=ROOT).returncode == 0
    assert PARENT.forked == before


def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def masked() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])


def with_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def ignoring() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("standing", [limited, masked, with_umask, ignoring])
def test_whoever_stands_elsewhere_executes(
    standing: Callable[[], Iterator[None]], tmp_path: Path
) -> None:
    """Limits, masks and namespaces of the parent are those that the run began with."""
    before = PARENT.forked
    with contextlib.contextmanager(standing)():
        changed = told_by(run, tmp_path)
    assert PARENT.forked == before
    assert changed != told_by(run, tmp_path)


@pytest.mark.parametrize(
    "more", [{"PYTHONPATH": "/elsewhere"}, {"PYTHONUTF8": "1"}, {"LC_ALL": "C"}, {"LD_X": "1"}]
)
def test_an_environment_that_python_heeds_is_for_exec(more: dict[str, str]) -> None:
    before = PARENT.forked
    assert run([*KVFS, "--version"], env={**os.environ, **more}, cwd=ROOT).returncode == 0
    assert PARENT.forked == before


@pytest.mark.real_exec
def test_what_is_marked_is_executed() -> None:
    before = PARENT.forked
    assert run_kvfs("--version").returncode == 0
    assert PARENT.forked == before


def test_another_tree_and_another_directory_are_for_exec(tmp_path: Path) -> None:
    """Without -P Python looks there first: somebody's module called trio may lie there."""
    (tmp_path / "kvfs").mkdir()
    (tmp_path / "kvfs" / "__init__.py").write_text("raise SystemExit(33)")
    assert run([*KVFS, "--version"], cwd=tmp_path).returncode == 33


def test_a_directory_that_is_not_there_fails_as_with_popen(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run([*KVFS, "--version"], cwd=tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        run([*KVFS[:1], "-P", *KVFS[1:], "--version"], cwd=tmp_path / "none")


def test_the_parent_ends_with_its_owner(tmp_path: Path) -> None:
    """Also if that is killed; what it has started ends by itself, as of any parent."""
    code = (
        "import os, signal, sys; from tests.support.forks.process import Process, PARENT\n"
        "child = Process([sys.executable, '-c', 'input()'], stdin=0)\n"
        "print(PARENT.pid, child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    owner = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    parent, child = map(int, owner.stdout.split())
    until(lambda: process_state(parent) in (None, "Z"), "the parent has ended")
    until(lambda: process_state(child) in (None, "Z"), "the child has read the end of its input")
    until(lambda: not list(tmp_path.iterdir()), "nothing is left of it")
