"""A mount with its supervisor: who dies, and what the mount, its status and its log say then."""

import concurrent.futures
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.machine.mount_table import mount_at
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import COMMAND_WAIT_S, KVFS, ROOT, run_kvfs
from tests.support.mounts.places import blank_place, small_mount
from tests.support.mounts.supervised import children_of, templates_of

pytestmark = [pytest.mark.needs_fuse, pytest.mark.real_exec]


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def test_without_its_supervisor_a_server_serves_on_and_says_so(place: Path) -> None:
    """[killed-supervisor] Every call works; only a death of the server would not be seen."""
    with small_mount(place) as mount, (mount.path / "open").open("wb", buffering=0) as before:
        before.write(b"before")
        (template,) = templates_of(mount.supervisor_pid)
        supervisor = os.pidfd_open(mount.supervisor_pid)
        signal.pidfd_send_signal(supervisor, signal.SIGKILL)
        os.close(supervisor)
        until(lambda: mount.status()["supervisor_pid"] is None, "the server notices")
        until(lambda: not os.path.exists(f"/proc/{template}"), "its template ends")
        assert mount.status()["server_pid"] == mount.server_pid
        assert ["the supervisor has died" in line for line in mount.errors()] == [True]
        before.write(b" and after")
        assert (mount.path / "open").read_bytes() == b"before and after"
        os.rename(mount.path / "open", mount.path / "block")
    assert mount_at(str(mount.path)) is None, "it stops as any"


def test_what_is_said_to_the_supervisor_the_server_does(place: Path) -> None:
    with small_mount(place) as mount:
        os.kill(mount.supervisor_pid, signal.SIGHUP)
        until(lambda: "settings reloaded" in mount.log_file.read_text(), "it reads them again")
        (mount.path / "block").write_bytes(b"kept")
        supervisor = os.pidfd_open(mount.supervisor_pid)
        signal.pidfd_send_signal(supervisor, signal.SIGTERM)
        mount.wait_stopped()
        os.close(supervisor)
        assert mount_at(str(mount.path)) is None
        assert "SIGTERM: stopping" in mount.log_file.read_text()


def test_in_the_foreground_it_ends_with_the_code_of_its_server(place: Path) -> None:
    """And Ctrl-C, which comes to all processes of a terminal's group, reaches the server once."""
    command = [*KVFS, "mount", "--foreground", "../pool", "../kv", "--capacity=64M"]
    (place / "here").mkdir()
    (place / "pool").mkdir(exist_ok=True)
    (place / "kv").mkdir(exist_ok=True)
    with subprocess.Popen(
        command,
        cwd=place / "here",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        process_group=0,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert any("serving" in line for line in process.stderr)
            assert (place / "kv").is_mount(), "paths are those of the caller's directory"
            assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
            os.killpg(process.pid, signal.SIGINT)
            said = process.stderr.read()
            assert process.wait(COMMAND_WAIT_S) == 0, said
            assert said.count("SIGINT: stopping") == 1
            assert "is unmounted" in said
        finally:
            process.kill()
            run_kvfs("umount", str(place / "kv"), check=False)


@pytest.mark.parametrize("path", ["passthrough", "daemon"])
def test_a_server_that_freezes_is_followed(place: Path, path: str) -> None:
    """[taken-over] By hand, without systemd's watchdog; what is open stays open."""
    flags = (f"--data-path={path}", "--set=silent_max_s=2")
    with small_mount(place, *flags) as mount, (mount.path / "a").open("xb", buffering=0) as draft:
        draft.write(b"before")
        frozen = mount.server_pid
        os.kill(frozen, signal.SIGSTOP)
        (mount.path / "b").write_bytes(b"waits, and goes on")
        mount.follow_server()
        draft.write(b" and after")
        assert (mount.path / "a").read_bytes() == b"before and after"
        assert f"server {frozen} says nothing for 2 s" in mount.log_file.read_text()
        assert 2.0 <= mount.status()["longest_pause_s"] < 7.0


def test_a_server_that_is_killed_before_it_serves_six_times(place: Path) -> None:
    """[taken-over] Somebody looks what happens, or there is no memory; calls wait, and go on."""
    with small_mount(place) as mount:
        others = {mount.server_pid, *templates_of(mount.supervisor_pid)}
        kills, first_s = 0, time.monotonic()
        mount.kill_server()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            store = threads.submit((mount.path / "block").write_bytes, b"kept")
            while kills < 6:
                for pid in set(children_of(mount.supervisor_pid)) - others:
                    others.add(pid)
                    os.kill(pid, signal.SIGKILL)
                    kills, last_s = kills + 1, time.monotonic()
            mount.follow_server()
            assert store.result(COMMAND_WAIT_S) == 4
        assert (mount.path / "block").read_bytes() == b"kept"
        assert mount.status()["restarts"] == 7
        assert mount.status()["longest_pause_s"] >= last_s - first_s


def test_of_a_server_that_none_can_follow_calls_end_at_once(place: Path) -> None:
    """Here because the supervisor has died as well."""
    with small_mount(place) as mount:
        block = mount.path / "block"
        block.write_bytes(b"kept")
        mount.kill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            block.read_bytes()
