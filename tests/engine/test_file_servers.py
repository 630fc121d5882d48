"""Which threads are a file server's: kernel threads on every kernel, programs by their process."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.machine.file_servers import is_kernel_thread
from kvfs.machine.process_ends import status_of
from kvfs.machine.processes import SERVER, Processes

KTHREADD: Final = 2
#: Names a second thread as servers name theirs; prints that thread's number.
_RENAMED: Final = """
import sys, threading
def work():
    open("/proc/thread-self/comm", "w").write("svc_7")
    print(threading.get_native_id(), flush=True)
    sys.stdin.read()
threading.Thread(target=work).start()
"""


@pytest.fixture
def makers() -> Iterator[Processes]:
    with contextlib.closing(Processes()) as made:
        yield made


def a_kernel_thread() -> int:
    """Return a child of kthreadd, as nfsd's threads are."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        if b"\nPPid:\t2\n" in status_of(int(name)):
            return int(name)
    pytest.skip("kernel threads are not to be seen here")


@contextlib.contextmanager
def program(directory: Path, name: str) -> Iterator[tuple[int, int]]:
    """Run a copy of the interpreter called *name*; yield two of its threads."""
    copy = directory / name
    shutil.copy(os.path.realpath(sys.executable), copy)
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    with subprocess.Popen(
        [copy, "-S", "-c", _RENAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_kernel_thread_is_known_without_the_line_of_newer_kernels() -> None:
    """Linux 6.1 has no ``Kthread:`` in /proc/PID/status."""
    status = re.sub(rb"\nKthread:\t\d\n", b"\n", status_of(a_kernel_thread()))
    assert is_kernel_thread(status)
    assert is_kernel_thread(status_of(a_kernel_thread()))
    own = re.sub(rb"\nKthread:\t\d\n", b"\n", status_of(os.getpid()))
    assert own
    assert not is_kernel_thread(own)


def test_who_dies_is_no_kernel_thread() -> None:
    """Its memory went before its files; it is no child of kthreadd."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        status = status_of(process.pid)
        assert b"\nVmSize:" not in status
        assert not is_kernel_thread(re.sub(rb"\nKthread:\t\d\n", b"\n", status))


def test_a_program_is_known_whatever_its_threads_are_called(
    makers: Processes, tmp_path: Path
) -> None:
    with program(tmp_path, "ganesha.nfsd") as threads:
        for tid in threads:
            assert makers.servers.have(tid, 0.0)
            assert makers.of(tid, 0.0) == SERVER


def test_a_setting_names_more(tmp_path: Path) -> None:
    name = "a-server-with-a-long-name"
    with program(tmp_path, name) as threads:
        with contextlib.closing(Processes()) as makers:
            assert not makers.servers.have(threads[1], 0.0)
            assert makers.of(threads[1], 0.0).tgid == threads[0]
        with contextlib.closing(Processes(f"unfsd, {name}")) as makers:
            assert makers.servers.have(threads[1], 0.0)


def test_who_cannot_be_looked_at_is_no_server_and_not_known_to_be_none(makers: Processes) -> None:
    for tid in (-1, 1 << 22):
        assert not makers.servers.have(tid, 0.0)
        assert tid not in makers.servers.others
    assert makers.servers.others == {0}


def test_a_thread_is_believed_for_a_second(makers: Processes) -> None:
    own = os.getpid()
    assert not makers.servers.have(own, 0.0)
    assert own in makers.servers.others
    makers.servers.forget_expired(0.5)
    assert own in makers.servers.others
    makers.servers.forget_expired(1.1)
    assert makers.servers.others == {0}
