"""Commands while no server serves: they wait for the next one, and then say what is true."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfs.cli.main import main
from kvfs.cli.mount_background import wait_for_outcome
from kvfs.client import processes_on_mount, servers, subprocesses
from kvfs.client.servers import answers
from kvfs.core import errors
from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.core.settings import Settings
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import run_kvfs
from tests.support.mounts.places import blank_place, small_mount
from tests.support.mounts.supervised import Supervised

pytestmark = pytest.mark.needs_fuse


@pytest.fixture
def mount() -> Iterator[Supervised]:
    """One whose supervisor can be stopped, and then starts no server."""
    with blank_place() as place, Supervised(place / "pool", place / "kv") as mount:
        (mount.path / "tmp").write_bytes(b"stored")
        (mount.path / "tmp").rename(mount.path / "block")
        yield mount
        os.kill(mount.supervisor_pid, signal.SIGCONT)
        if mount.server_ends(0):
            mount.follow()


def die(mount: Supervised) -> None:
    """Kill the server; nobody follows it until its supervisor goes on."""
    os.kill(mount.supervisor_pid, signal.SIGSTOP)
    mount.kill_server()
    assert mount.server_ends(30)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("words", [["status"], ["evict", "--dry-run"], ["sync"]])
def test_a_command_waits_for_the_next_server(
    mount: Supervised,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: bool,
) -> None:
    if not named and words != ["status"]:
        pytest.skip("takes a path")
    has_ended = servers.has_ended

    def look(mountpoint: str) -> bool:
        """Once it has been looked whether the mount is dead, the next server comes."""
        if mountpoint == str(mount.path):
            os.kill(mount.supervisor_pid, signal.SIGCONT)
        return has_ended(mountpoint)

    monkeypatch.setattr(servers, "has_ended", look)
    monkeypatch.setattr(servers, "_TAKEOVER_WAIT_S", 60.0)
    die(mount)
    path = str(mount.path / "block" if words[0] == "evict" else mount.path)
    code = main([*words, *([path] if named else [])])
    said = capsys.readouterr()
    assert code == 0, said.err
    # Those of other tests may be dead.
    assert not [line for line in said.err.splitlines() if str(mount.path) in line]


def test_then_it_says_that_the_next_one_does_not_serve_yet(
    mount: Supervised, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "_TAKEOVER_WAIT_S", 0.1)
    monkeypatch.setattr(subprocesses, "LOOK_MAX_S", 1.0)
    die(mount)
    coming = f"kvfs: the server of {mount.path} has died, and the next one does not serve yet; "
    for words in (["status", str(mount.path)], ["status"], ["sync", str(mount.path)]):
        code = main(words)
        said = capsys.readouterr().err
        # Tests beside this one may run a kvfs whose umount removes all sockets without a server.
        assert coming in said or f"no response from the server of {mount.path}: no " in said
        assert f"the server of {mount.path} is dead" not in said
        # Without a path those of other mounts may have answered.
        assert code == errors.ServeFailed.exit_code or words == ["status"]
    assert main(["doctor", str(mount.path)]) == errors.SeriousFindings.exit_code
    found = " ".join(capsys.readouterr().out.split())  # a table wraps at words
    if "calls hang: no response from the server" not in found:  # the socket is gone, as above
        assert "the next one does not serve yet: calls wait for it" in found
        assert f"1. kvfs status {mount.path} # wait until" in found
        assert "kvfs umount" not in found


def test_servers_that_hang_are_asked_side_by_side() -> None:
    """Nobody answers before all have been asked."""
    paths = [f"{RUN_DIRECTORY}/kvfs-test-{os.getpid()}-{n}.sock" for n in range(4)]
    os.makedirs(RUN_DIRECTORY, exist_ok=True)

    def answer() -> None:
        callers = [one.accept()[0] for one in listening]
        for caller in callers:
            caller.recv(4096)
            caller.sendall(b'{"v": 1, "ok": true, "result": {}}\n')
            caller.close()

    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for one, path in zip(listening, paths, strict=True):
            one.bind(path)
            stack.callback(os.unlink, path)
            one.listen()
        threading.Thread(target=answer, daemon=True).start()
        errors_of = {one.path: one.error for one in answers() if one.path in paths}
    assert errors_of == dict.fromkeys(paths)


def test_doctor_says_that_there_is_no_supervisor() -> None:
    with blank_place() as place, small_mount(place) as mount:
        pidfd = os.pidfd_open(mount.supervisor_pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        told = "the server has no supervisor, which would start another one"
        # The server finds out at its next message.
        until(lambda: told in run_kvfs("doctor", str(mount.path), check=False).stdout, "it is told")


def test_so_many_servers_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def pool(most: int) -> ThreadPoolExecutor:
        threads.append(most)
        return ThreadPoolExecutor(most)

    monkeypatch.setattr(servers, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(servers, "socket_paths", lambda: [f"/nowhere/{n}.sock" for n in range(100)])
    assert len(list(answers())) == 100
    assert threads == [32]


def test_of_why_a_server_died_the_beginning_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dead").write_text("x" * 5000)
    monkeypatch.setattr(servers, "dead_path", lambda _: str(tmp_path / "dead"))
    assert f"is dead: {'x' * 500};" in servers._dead("/kv")


def test_of_many_processes_on_a_mount_some_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each takes a look at all its descriptors."""
    found = ((str(pid), "bash") for pid in range(100))
    monkeypatch.setattr(processes_on_mount, "holders", lambda _: found)
    monkeypatch.setattr("sys.argv", ["processes_on_mount", "/kv"])
    processes_on_mount.main()
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert next(found)[0] == "3"


def test_a_report_without_an_end_is_none() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x" * (64 << 10))
    assert wait_for_outcome(reading, 600.0, lambda *_: None) is None
    os.close(reading)
    os.close(writing)


def test_no_stop_is_waited_for_longer_than_one_may_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    most_s = Settings.__dataclass_fields__["stop_timeout_s"].metadata["high"]
    assert main(["umount", "--wait-s", f"{most_s + 1}", "/nowhere"]) == errors.UsageError.exit_code
    assert "--wait-s" in capsys.readouterr().err
