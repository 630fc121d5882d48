"""A copy of a mount in a mount namespace of its own: who has it is named, and how it ends."""

import os
import re
import subprocess

import pytest

from kvfs.cli import umount
from kvfs.core import errors
from kvfs.machine.mount_table import Mount, elsewhere
from tests.fuse.conftest import require_passthrough
from tests.support.devices.pools import blank_source
from tests.support.mounts.copies import copy_of_all_mounts
from tests.support.mounts.mounting import Mounted, run_kvfs, workplace

pytestmark = pytest.mark.needs_fuse


def refused(*arguments: str) -> tuple[int, str]:
    done = run_kvfs(*arguments, check=False)
    return done.returncode, done.stderr


def as_shown(said: str, path: str) -> None:
    """Run what the line about *path* says; others on this machine may have copies as well."""
    (line,) = [line for line in said.splitlines() if path in line]
    subprocess.run(["sh", "-c", line.split("`")[1]], check=False)


@pytest.mark.needs_loop
@pytest.mark.parametrize("kind", ["directory", "block", "image"])
def test_umount_status_mount_and_fsck_name_the_holder(kind: str) -> None:
    with (
        blank_source(kind) as source,
        workplace("disk") as place,
        Mounted(source.path, place / "kv") as mount,
        copy_of_all_mounts() as holder,
    ):
        path = str(mount.path)
        (place / "other").mkdir()
        named = rf"at {path} in the mount namespace of process {holder.pid} \(cat, mnt:\[\d+\]\)"
        way_out = f"nsenter -t {holder.pid} -m umount {path}"
        code, said = refused("umount", path)
        assert code == errors.ServeFailed.exit_code
        assert f"{path} is unmounted here, but server {mount.server_pid} runs on" in said
        assert re.search(named, said), said
        assert way_out in said
        for code, arguments in (
            (errors.NotMounted.exit_code, ("umount", path)),
            (errors.NotMounted.exit_code, ("status", path)),
            (errors.SourceBusy.exit_code, ("mount", source.path, path)),
            (errors.SourceBusy.exit_code, ("mount", source.path, str(place / "other"))),
            (errors.SourceBusy.exit_code, ("fsck", source.path)),
            (errors.SourceBusy.exit_code, ("destroy", source.path, "--yes")),
        ):
            ended, said = refused(*arguments)
            assert (ended, arguments) == (code, arguments), said
            assert re.search(named, said), (arguments, said)
            assert way_out in said
        said = run_kvfs("status").stderr
        assert re.search(named, said), said
        assert f"no kvfs is mounted at {path} here: it is mounted at" in said
        as_shown(said, path)
        mount._wait_for_server()
        mount.start()
        assert not list(elsewhere(lambda one: one.mountpoint == path))


def test_a_lazy_umount_names_him_too() -> None:
    with workplace() as place:
        (place / "pool").mkdir()
        with Mounted(place / "pool", place / "kv") as mount:
            with copy_of_all_mounts() as holder:
                said = run_kvfs("umount", "--lazy", str(mount.path)).stderr
                assert f"server {mount.server_pid} runs until its last user ends" in said
                assert f"in the mount namespace of process {holder.pid} (cat, mnt:[" in said
            mount._wait_for_server()


def test_a_dead_servers_copy_keeps_no_next_server_out() -> None:
    with workplace() as place:
        (place / "pool").mkdir()
        with Mounted(place / "pool", place / "kv") as mount, copy_of_all_mounts():
            mount.kill_daemon()
            mount.start()
            (mount.path / "block").write_bytes(b"served")
            mount.stop()


def test_a_name_of_a_process_writes_nothing_on_the_terminal() -> None:
    forged = ("sh", "-c", r"printf '\033[2J' > /proc/$$/comm; read line; echo $line; read line")
    with workplace() as place:
        (place / "pool").mkdir()
        with Mounted(place / "pool", place / "kv") as mount, copy_of_all_mounts(*forged):
            _, said = refused("umount", str(mount.path))
            assert f"server {mount.server_pid} runs" in said
            assert r"(\x1b[2J, mnt:[" in said
            as_shown(said, str(mount.path))
            mount._wait_for_server()


@pytest.mark.needs_loop
@pytest.mark.parametrize("kind", ["block", "image"])
def test_umount_of_a_dead_mount_names_who_holds_its_source(kind: str) -> None:
    """The copy keeps the extents that were registered with the kernel: nothing is to be awaited."""
    with (
        blank_source(kind) as source,
        workplace("disk") as place,
        Mounted(source.path, place / "kv") as mount,
    ):
        require_passthrough(mount)
        (mount.path / "block").write_bytes(b"stored")
        (mount.path / "block").read_bytes()
        with copy_of_all_mounts() as holder:
            mount.kill()
            said = run_kvfs("umount", str(mount.path)).stderr
            assert f"kvfs: {source.path} stays in use: the pool is mounted at {mount.path}" in said
            assert f"in the mount namespace of process {holder.pid} (cat, mnt:" in said
            as_shown(said, str(mount.path))


def test_a_copy_that_comes_while_umount_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it lasts: one that is gone at the next look was made for mkfs.xfs, perhaps."""
    passing, lasting = ": it is mounted in one", ": it is mounted elsewhere"
    notes = ["", passing, lasting, lasting]
    monkeypatch.setattr(umount, "note_of", lambda _: notes.pop(0))
    monkeypatch.setattr(umount, "_LOOK_S", 0.01)
    monkeypatch.setattr(umount, "_LOOK_AGAIN_S", 0.01)
    pidfd = os.pidfd_open(os.getpid())
    try:
        held = Mount("/kv", "fuse.kvfs", "/pool", "0:77", ())
        told = umount._wait_for_server(os.getpid(), pidfd, held, 3600.0)
    finally:
        os.close(pidfd)
    assert told == (False, lasting)
