"""Processes and their deaths, with real ones: who made a block, and how he ended."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvfs.machine.process_ends import Fate, judge, stat_fields
from kvfs.machine.processes import NOBODY, OVERFLOW_UID, SERVER, UNKNOWN_UID, Maker, Processes
from tests.support.clients.stepping import until

#: A kernel thread: kthreadd.
KERNEL_THREAD: Final = 2
DEADLINE_S: Final = 20


@pytest.fixture
def makers() -> Iterator[Processes]:
    with contextlib.closing(Processes()) as made:
        yield made


@contextlib.contextmanager
def child(*, name: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that waits for its standard input to end."""
    rename = f"open('/proc/self/comm', 'w').write({name!r}); " if name else ""
    code = f"import sys; {rename}print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        try:
            yield process
        finally:
            process.kill()


def wait_for_end(pid: int) -> None:
    """Wait until *pid* has ended, without reaping it."""
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], DEADLINE_S)[0]
    finally:
        os.close(pidfd)


# ---- who ----


def test_a_process_is_its_number_and_its_birth(makers: Processes) -> None:
    own = makers.of(os.getpid(), 0.0)
    assert own.tgid == os.getpid()
    assert own.birth
    with child() as one, child() as other:
        births = {makers.of(process.pid, 0.0).birth for process in (one, other)}
        assert len(births | {own.birth}) == 3


def test_a_thread_belongs_to_its_process(makers: Processes) -> None:
    found: list[Maker] = []
    thread = threading.Thread(
        target=lambda: found.append(makers.of(threading.get_native_id(), 0.0))
    )
    thread.start()
    thread.join()
    assert found == [makers.of(os.getpid(), 0.0)]


@pytest.mark.parametrize("tid", [0, -1, 1 << 22])
def test_what_cannot_be_watched_is_nobody(makers: Processes, tid: int) -> None:
    """A foreign pid namespace, a thread that is gone."""
    assert makers.of(tid, 0.0) == NOBODY


def test_a_kernel_thread_is_a_server(makers: Processes) -> None:
    """nfsd is one."""
    assert makers.of(KERNEL_THREAD, 0.0) == SERVER


@pytest.mark.parametrize("tid", [0, -1, 1 << 22, KERNEL_THREAD])
def test_who_cannot_be_told_is_no_user(makers: Processes, tid: int) -> None:
    """A foreign or vanished thread, and one of the kernel, which is root's and acts for others."""
    assert makers.uid_of(tid) == UNKNOWN_UID


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_user_is_that_of_the_thread_and_of_the_file_system(makers: Processes) -> None:
    """A server in user space takes its client's for each request (setfsuid(2)), in one thread."""
    setfsuid, told = ctypes.CDLL(None).setfsuid, []

    def serve() -> None:
        for uid in (1000, OVERFLOW_UID, 0):
            setfsuid(uid)
            told.append(makers.uid_of(threading.get_native_id()))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert told == [1000, UNKNOWN_UID, 0]
    assert makers.uid_of(os.getpid()) == 0


def test_an_nfs_server_makes_nothing_of_its_own(makers: Processes) -> None:
    with child(name="ganesha.nfsd") as process:
        assert makers.of(process.pid, 0.0) == SERVER


def test_a_thread_is_looked_at_again_after_a_second(makers: Processes) -> None:
    with child() as process:
        maker = makers.of(process.pid, 0.0)
    assert makers.of(process.pid, 0.9) == maker
    assert makers.of(process.pid, 1.1) == NOBODY


# ---- without descriptors ----


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Take all descriptors that this process may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 10
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_reserve_answers_when_no_descriptor_is_left(makers: Processes) -> None:
    with child() as dead, child() as living, child() as known:
        dead.kill()
        wait_for_end(dead.pid)
        makers.ended()  # the tick
        with no_descriptor_left():
            for _ in range(20):
                assert makers.fate_of(dead.pid) is Fate.KILLED
                assert makers.fate_of(living.pid) is Fate.LIVES
            maker = makers.of(known.pid, 0.0)
            assert maker.tgid == known.pid
            assert makers.lives(maker)


def test_without_any_descriptor_nothing_is_told(makers: Processes) -> None:
    """Neither that it lives nor that it does not; and the next time it is looked at again."""
    with child() as dead, child() as living:
        with contextlib.closing(Processes()) as others:
            maker = others.of(living.pid, 0.0)
        dead.kill()
        wait_for_end(dead.pid)
        with no_descriptor_left():
            assert makers.fate_of(dead.pid) is Fate.UNKNOWN
            assert makers.fate_of(living.pid) is Fate.UNKNOWN
            assert makers.of(living.pid, 0.0) == NOBODY
            assert makers.ask(maker).fate is Fate.UNKNOWN
            with pytest.raises(OSError, match="Too many open files"):
                makers.lives(maker)
        assert makers.fate_of(dead.pid) is Fate.KILLED
        assert makers.of(living.pid, 0.0) == maker


# ---- lives ----


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_an_end_is_told_once(makers: Processes, how: signal.Signals | None) -> None:
    with child() as process, child() as other:
        maker = makers.of(process.pid, 0.0)
        makers.of(other.pid, 0.0)
        assert makers.lives(maker)
        assert makers.ended() == []
        if how is None:
            process.communicate()
        else:
            process.send_signal(how)
            wait_for_end(process.pid)
        assert makers.ended() == [maker]
        assert makers.ended() == []
        assert not makers.lives(maker)


def test_a_fork_is_another_process_and_an_execve_is_not(makers: Processes) -> None:
    code = (
        "import os, sys\n"
        "os.write(1, b'%d\\n' % os.fork())\n"
        "sys.stdin.readline()\n"
        "os.execv(sys.executable, [sys.executable, '-S', '-c', 'print(1, flush=True); input()'])"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        numbers = {int(process.stdout.readline()), int(process.stdout.readline())}
        forked = max(numbers)
        one, other = makers.of(process.pid, 0.0), makers.of(forked, 0.0)
        assert one != other
        os.kill(forked, signal.SIGKILL)
        wait_for_end(forked)
        assert makers.ended() == [other]
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"1\n"
        assert makers.of(process.pid, 5.0) == one
        assert makers.lives(one)
        process.kill()


def test_a_successor_knows_who_lives(makers: Processes) -> None:
    """After a restart of the daemon: by number and birth, not by number alone."""
    with child() as process:
        with contextlib.closing(Processes()) as before:
            maker = before.of(process.pid, 0.0)
        assert makers.lives(maker)
        assert not makers.lives(maker._replace(birth=maker.birth + 1))
        process.kill()
        wait_for_end(process.pid)
        assert makers.ended() == [maker]


@pytest.mark.parametrize("tgid", [0, (1 << 32) - 1, 1 << 40])
def test_an_impossible_number_is_nobody_alive(makers: Processes, tgid: int) -> None:
    assert not makers.lives(Maker(tgid, 1))


def test_a_zombie_does_not_live(makers: Processes) -> None:
    with child() as process:
        maker = makers.of(process.pid, 0.0)
        process.kill()
        wait_for_end(process.pid)
        with contextlib.closing(Processes()) as other:
            assert not other.lives(maker)


# ---- how it ends ----


def test_a_living_process_dies_of_nothing(makers: Processes) -> None:
    with child() as process:
        assert makers.fate_of(process.pid) is Fate.LIVES
    assert makers.fate_of(os.getpid()) is Fate.LIVES
    assert makers.fate_of(KERNEL_THREAD) is Fate.LIVES


def test_of_a_living_process_only_what_never_waits_is_read(
    makers: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside execve(2) every other file of /proc would wait for us, and we for it."""
    asked: list[str] = []
    open_file = os.open

    def note(path: str, flags: int) -> int:
        asked.append(path)
        return open_file(path, flags)

    with child() as process:
        monkeypatch.setattr(os, "open", note)
        for _ in range(3):
            assert makers.fate_of(process.pid) is Fate.LIVES
        makers.of(process.pid, 0.0)
        monkeypatch.undo()
    # Its statm stays open for the next close.
    assert asked == [f"/proc/{process.pid}/statm", f"/proc/{process.pid}/status"]


def test_who_was_seen_alive_is_seen_to_die(makers: Processes) -> None:
    with child() as process:
        assert makers.fate_of(process.pid) is Fate.LIVES
        process.kill()
        wait_for_end(process.pid)
        assert makers.fate_of(process.pid) is Fate.KILLED


def test_a_number_that_went_to_another_thread_is_looked_up_anew(makers: Processes) -> None:
    """What is kept of a thread that is gone says nothing of the next one with its number."""
    with child() as gone, child() as other:
        assert makers.fate_of(gone.pid) is makers.fate_of(other.pid) is Fate.LIVES
        gone.kill()
        gone.wait()
        other.kill()
        wait_for_end(other.pid)
        statms = makers._statms
        os.dup2(statms[gone.pid], statms[other.pid])
        assert makers.fate_of(other.pid) is Fate.KILLED
        assert makers.fate_of(gone.pid) is Fate.UNKNOWN
    assert list(statms) == [other.pid]


def test_no_more_threads_are_kept_than_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.machine.processes.THREADS_MAX", 2)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(Processes()) as made, contextlib.ExitStack() as children:
        processes = [children.enter_context(child()) for _ in range(4)]
        with_pipes = len(os.listdir("/proc/self/fd"))
        for process in processes * 2:
            assert made.fate_of(process.pid) is Fate.LIVES
        assert len(os.listdir("/proc/self/fd")) == with_pipes + 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_processes_are_watched_than_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others a lease ends by time."""
    monkeypatch.setattr("kvfs.machine.processes._PROCESSES_MAX", 2)
    with contextlib.closing(Processes()) as made, contextlib.ExitStack() as children:
        processes = [children.enter_context(child()) for _ in range(4)]
        makers = [made.of(process.pid, 0.0) for process in processes]
        for process in processes:
            process.kill()
            wait_for_end(process.pid)
        assert set(made.ended()) == set(makers[:2])


def run_in_child(end: Callable[[], None]) -> Fate:
    """Return what ``fate_of`` says of a zombie child that ended by *end*."""
    process = multiprocessing.get_context("fork").Process(target=end)
    process.start()
    assert process.pid is not None
    wait_for_end(process.pid)
    with contextlib.closing(Processes()) as made:
        told = made.fate_of(process.pid)
    process.join()
    return told


def raise_signal(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV])
def test_the_signal_of_a_dead_process_is_told(number: signal.Signals) -> None:
    assert run_in_child(lambda: raise_signal(number)) is Fate.KILLED


def test_sigkill_is_told() -> None:
    assert run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) is Fate.KILLED


@pytest.mark.parametrize("tid", [0, -1, 1 << 22])
def test_of_a_foreign_or_vanished_thread_nothing_is_known(makers: Processes, tid: int) -> None:
    """Another pid namespace, no such directory in /proc."""
    assert makers.fate_of(tid) is Fate.UNKNOWN


def test_a_process_is_judged_at_any_moment_of_its_end(makers: Processes) -> None:
    """Living, stopped, dead, waited for; and of one whose number is another's nothing is known."""
    with child() as process:
        maker = makers.of(process.pid, 0.0)

        def fate() -> Fate | None:
            question = makers.ask(maker)
            question.wait(DEADLINE_S)
            return question.fate

        assert fate() is Fate.LIVES
        process.send_signal(signal.SIGSTOP)
        until(lambda: stat_fields(process.pid)[:1] == [b"T"], "stopped")
        assert fate() is Fate.LIVES
        process.kill()
        wait_for_end(process.pid)
        assert fate() is Fate.KILLED
        assert makers.ended() == [maker]
        process.wait()
        assert fate() is Fate.KILLED
        assert makers.ask(maker._replace(birth=1)).fate is Fate.UNKNOWN


def test_who_was_waited_for_is_remembered_by_his_descriptor() -> None:
    """From Linux 6.15 on; before, nothing is known then."""
    with child() as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            assert judge(process.pid, pidfd) is Fate.LIVES
            process.kill()
            process.wait()
            assert judge(process.pid, pidfd) in (Fate.KILLED, Fate.UNKNOWN)
        finally:
            os.close(pidfd)


@pytest.mark.parametrize("code", [0, 1, 9, 137, 255])
def test_an_exit_is_no_signal(code: int) -> None:
    assert run_in_child(lambda: os._exit(code)) is Fate.EXITED


def test_nobody_of_another_boot_lives(makers: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is started at boot has the same number again, and the same pidfd."""
    maker = makers.of(os.getpid(), 0.0)
    monkeypatch.setattr("kvfs.machine.processes.present_boot_id", lambda: "another")
    with contextlib.closing(Processes()) as later:
        assert not later.lives(maker)
        assert later.lives(later.of(os.getpid(), 0.0))
        assert later.of(os.getpid(), 0.0) != maker
