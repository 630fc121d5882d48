"""[killed-daemon] The next mount takes the place of what a killed server left, also in use."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.cli.dead_place import Place, hold_place
from kvfs.client import subprocesses
from kvfs.client.dead_mount import dead_mount_at, take_away
from kvfs.client.liveness import held_up_server
from kvfs.core import errors
from kvfs.machine.mount_table import mounts
from tests.fuse.conftest import require_passthrough
from tests.support.clients.stepping import STEP_WAIT_S
from tests.support.devices.pools import MIB, blank_source
from tests.support.kills.held_up import held_up
from tests.support.mounts.mounting import KVFS, ROOT, Mounted, run_kvfs, workplace
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def times_mounted(path: Path) -> int:
    return [mount.mountpoint for mount in mounts()].count(str(path))


@pytest.mark.needs_loop
@pytest.mark.parametrize("kind", ["directory", "block", "image"])
@pytest.mark.parametrize("path", ["daemon", "passthrough"])
def test_a_mount_takes_a_dead_ones_place_while_clients_hold_its_files(kind: str, path: str) -> None:
    with (
        blank_source(kind) as source,
        workplace("disk") as directory,
        Mounted(source.path, directory / "kv", f"--data-path={path}") as mount,
        contextlib.ExitStack() as clients,
    ):
        if path == "passthrough":
            require_passthrough(mount)
        (mount.path / "tmp").write_bytes(b"kept" * MIB)
        (mount.path / "tmp").rename(mount.path / "block")
        reading = clients.enter_context((mount.path / "block").open("rb", buffering=0))
        inside = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=mount.path)
        clients.callback(inside.communicate)
        mount.kill()
        done = run_kvfs("mount", mount.source, str(mount.path), *mount.flags)
        told = f"kvfs: replaces a dead mount of {source.path} at {mount.path}\n"
        assert done.stderr == told
        mount.adopt()
        assert times_mounted(mount.path) == 1
        assert (mount.path / "block").read_bytes() == b"kept" * MIB
        (mount.path / "more").write_bytes(b"stored")
        if path == "passthrough":  # what the kernel reads by itself it reads on
            assert os.pread(reading.fileno(), 4, 0) == b"kept"
        else:
            with pytest.raises(OSError, match="not connected"):
                os.pread(reading.fileno(), 4, 4 * MIB - 4)
        with contextlib.suppress(OSError):  # the FLUSH of a close
            clients.close()
        mount.stop()
        assert times_mounted(mount.path) == 0


def test_a_dead_mount_in_use_is_unmounted_without_a_word_about_it(place: Path) -> None:
    with small_mount(place) as mount:
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=mount.path)
        try:
            mount.kill()
            assert run_kvfs("umount", str(mount.path)).stderr == ""
            assert times_mounted(mount.path) == 0
        finally:
            holder.communicate()


def test_umount_ends_calls_that_wait_for_nobody_but_a_thread_of_an_earlier_server(
    place: Path,
) -> None:
    """The server that had the control socket is gone with its supervisor, an earlier one is not."""
    failed: list[int | None] = []

    def look() -> None:
        try:
            (mount.path / "new").stat()
        except OSError as error:
            failed.append(error.errno)

    with small_mount(place) as mount:
        umount = [*KVFS, "umount", str(mount.path)]
        with held_up(mount.server_pid) as pid:
            assert held_up_server(str(mount.path)) == 0, "a living server has it, too"
            mount.kill()
            waiting = threading.Thread(target=look)
            waiting.start()
            assert held_up_server(str(mount.path)) == pid
            said = run_kvfs("status", str(mount.path), check=False).stderr
            assert f"the server of {mount.path} is dead; `kvfs umount {mount.path}` clears" in said
            assert waiting.is_alive()
            ending = subprocess.Popen(umount, stderr=subprocess.PIPE, cwd=ROOT)
            waiting.join(STEP_WAIT_S)
            assert failed == [errno.ECONNABORTED]
        assert ending.communicate(timeout=STEP_WAIT_S) == (None, b"")
        assert ending.returncode == 0
        assert times_mounted(mount.path) == 0


def test_of_two_who_start_at_a_dead_mount_one_serves(place: Path) -> None:
    with small_mount(place) as mount:
        mount.kill()
        starts = [
            subprocess.Popen(
                [
                    *KVFS,
                    "mount",
                    mount.source,
                    str(mount.path),
                    f"--name=kvfs-test-{os.getpid()}-{n}",
                ],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for n in range(3)
        ]
        said = [start.communicate(timeout=60)[1] for start in starts]
        codes = sorted(start.returncode for start in starts)
        refusals = {errors.SourceBusy.exit_code, errors.MountpointUnusable.exit_code}
        assert codes[0] == 0, said
        assert set(codes[1:]) <= refusals, said
        mount.adopt()
        assert times_mounted(mount.path) == 1
        (mount.path / "block").write_bytes(b"served")


def test_what_is_not_known_to_be_dead_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "LOOK_MAX_S", 1.0)
    with small_mount(place) as mount:
        os.kill(mount.server_pid, signal.SIGSTOP)
        try:
            assert dead_mount_at(str(mount.path)) is None
            assert hold_place(str(mount.path), take_away) == Place([], is_held=False)
            done = run_kvfs("mount", mount.source, str(mount.path), check=False)
            assert done.returncode == errors.MountpointUnusable.exit_code
            assert "is already a kvfs mount of" in done.stderr
        finally:
            os.kill(mount.server_pid, signal.SIGCONT)
        (mount.path / "block").write_bytes(b"served")


def test_a_mount_that_came_meanwhile_is_not_taken_away(place: Path) -> None:
    with small_mount(place) as mount:
        mount.kill()
        dead = dead_mount_at(str(mount.path))
        assert dead is not None
        take_away(dead)
        mount.start()
        take_away(dead)  # the new one may well have the old one's device number
        (mount.path / "block").write_bytes(b"served")


def test_a_dead_mount_outlasts_a_start_with_wrong_arguments(place: Path) -> None:
    """Bare, its place would take what clients store."""
    with small_mount(place) as mount:
        mount.kill()
        inside = str(mount.path / "pool")
        done = run_kvfs("mount", inside, str(mount.path), check=False)
        assert done.returncode == errors.MountpointUnusable.exit_code
        with pytest.raises(OSError, match="not connected"):
            (mount.path / "block").write_bytes(b"nowhere")
