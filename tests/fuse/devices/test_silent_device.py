"""The device below does not answer: what waits, what goes on, and what users are told."""

import errno
import os
import signal
from typing import Final

import pytest

from kvfs.storage.file_xattrs import XATTR_FIXED
from tests.support.clients.stepping import until
from tests.support.devices.calls_at_a_silence import (
    BLOCKS,
    DATA,
    calling,
    calls_with_device,
    calls_without_device,
    prepare,
    store,
    waits_of_main_thread,
)
from tests.support.devices.failing_drive import FailingDrive, mounted_on
from tests.support.kernel.caches import pool_root
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

COUNT: Final = 40
#: Both soon; the silence of a server that is only slow, on a busy machine, is shorter.
SETTINGS: Final = ("--set=silent_max_s=4", "--set=device_silent_s=1")
UMOUNT_EXIT_CODE: Final = 12
#: No call may take longer, though the device is silent for much longer. A store is refused in less
#: than a second on a quiet machine.
LONGEST_S: Final = 4.0


@pytest.fixture(params=["daemon", "passthrough"])
def data_path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def told_by(command: str, mounted: Mounted) -> tuple[int, str]:
    done = run_kvfs(command, str(mounted.path), check=False)
    return done.returncode, done.stdout + done.stderr


def test_what_needs_no_device_goes_on_beside_stores(drive: FailingDrive, data_path: str) -> None:
    """[device-aside] Calls of every kind at once: no thread that answers waits for the device."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        kv, server_pid = mounted.path, mounted.status()["server_pid"]
        prepare(kv)
        run_kvfs("sync", str(kv))
        (kv / "loaded" / "0").read_bytes()
        with (
            waits_of_main_thread(server_pid) as waits,
            drive.silent(),
            calling(calls_without_device(kv), calls_with_device(kv)) as (free, bound),
        ):
            until(lambda: mounted.status()["device_state"] == "silent", "the probe finds out")
            until(lambda: all(calls.errors for calls in bound.values()), "stores are refused")
            before = {name: calls.done for name, calls in free.items()}
            until(
                lambda: all(calls.done > before[name] + 20 for name, calls in free.items()),
                "what needs no device goes on",
            )
        assert waits == []
        assert {error for calls in bound.values() for error in calls.errors} == {errno.EIO}
        assert not any(calls.errors for calls in free.values())
        assert max(calls.longest_s for calls in (*free.values(), *bound.values())) < LONGEST_S
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        status = mounted.status()
        assert (status["server_pid"], status["restarts"]) == (server_pid, 0), mounted.errors()
        store(kv / "stored", "afterwards")
        assert all((kv / "loaded" / f"{number}").read_bytes() == DATA for number in range(BLOCKS))


def test_a_load_that_needs_the_device_ends(drive: FailingDrive) -> None:
    """[device-aside] On the daemon path; on passthrough a read waits in the kernel."""
    with mounted_on(drive, "daemon", *SETTINGS, "--set=device_deadline_s=2") as mounted:
        store(mounted.path, "block")
        run_kvfs("sync", str(mounted.path))
        mounted.stop()
        mounted.start()
        with drive.silent(), pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (mounted.path / "block").read_bytes()
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        assert (mounted.path / "block").read_bytes() == DATA


def test_an_open_that_is_compared_first_ends(drive: FailingDrive, data_path: str) -> None:
    """[device-aside] The server reads the block for that: a load ends late, a store at once."""
    flags = ("--set=verify=open", "--set=checksum_share=1", "--set=device_deadline_s=2")
    with mounted_on(drive, data_path, *SETTINGS, *flags) as mounted:
        store(mounted.path, "block")
        run_kvfs("sync", str(mounted.path))
        mounted.stop()
        mounted.start()
        os.stat(mounted.path / "block")
        with drive.silent():
            for how in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
                with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                    os.open(mounted.path / "block", how)
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        assert (mounted.path / "block").read_bytes() == DATA


def test_while_nobody_stores_names_and_cached_bytes_are_served(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-silent] A probe finds the silence out, and says when it has ended."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        for number in range(COUNT):
            store(mounted.path, f"{number}")
        run_kvfs("sync", str(mounted.path))
        assert mounted.status()["device_state"] == "serving"
        with drive.silent():
            until(lambda: mounted.status()["device_state"] == "silent", "the probe finds out")
            assert mounted.status()["device_silent_s"] >= 1
            assert sorted(os.listdir(mounted.path), key=int) == [f"{n}" for n in range(COUNT)]
            assert os.stat(mounted.path / "0").st_size == len(DATA)
            assert os.statvfs(mounted.path).f_bfree > 0
            assert (mounted.path / "0").read_bytes() == DATA
            _, shown = told_by("status", mounted)
            assert "device silent for, s" in shown
            _, report = told_by("doctor", mounted)
            assert f"{drive.path} has not answered for" in report
            assert "kill nothing" in report
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        assert mounted.status()["device_silent_s"] == 0
        assert any("the device has not answered" in line for line in mounted.errors())
        assert "the device answers again, after" in mounted.log_file.read_text()


def test_an_unmount_does_not_wait_for_the_device(drive: FailingDrive, data_path: str) -> None:
    """[device-silent] It detaches the mount and says what stays; the server ends by itself."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        server_pid = mounted.status()["server_pid"]
        store(mounted.path, "block")
        with drive.silent():
            code, told = told_by("umount", mounted)
            assert code == UMOUNT_EXIT_CODE, told
            assert f"server {server_pid} runs on: it waits for {drive.path}, which" in told
            assert not mounted.path.is_mount()
            assert os.path.exists(f"/proc/{server_pid}")
        until(lambda: not os.path.exists(f"/proc/{server_pid}"), "the server ends by itself")
        mounted.start()
        assert (mounted.path / "block").read_bytes() == DATA


def identities(mounted: Mounted) -> list[bool]:
    """Return of each block of *mounted*'s pool whether the device vouches for its bytes."""
    extents = [file for file in (pool_root(mounted) / "extents").rglob("*") if file.is_file()]
    return [XATTR_FIXED in os.listxattr(file) for file in extents]


def test_a_kill_after_an_open_that_was_refused_costs_nothing(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-aside] Nobody has the handle: what is written later is published, and durable."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        store(mounted.path, "block")
        run_kvfs("sync", str(mounted.path))
        with drive.silent():
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.open(mounted.path / "block", os.O_WRONLY | os.O_APPEND)
            os.kill(mounted.server_pid, signal.SIGKILL)
        mounted.follow_server()
        with (mounted.path / "block").open("ab") as block:
            block.write(b"more")
        run_kvfs("sync", str(mounted.path))
        assert (mounted.path / "block").read_bytes() == DATA + b"more"
        assert [named for named in identities(mounted) if named] == [True]


def test_a_killed_server_is_followed_while_the_drive_is_silent(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-aside] The next one serves what needs no device, and says that it is silent."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        for number in range(COUNT):
            store(mounted.path, f"{number}")
        run_kvfs("sync", str(mounted.path))
        (mounted.path / "0").read_bytes()
        killed_pid = mounted.server_pid
        with drive.silent(), open(mounted.path / "0", "rb") as block:
            os.kill(killed_pid, signal.SIGKILL)
            mounted.follow_server()
            assert mounted.server_pid != killed_pid
            assert sorted(os.listdir(mounted.path), key=int) == [f"{n}" for n in range(COUNT)]
            assert block.read() == DATA
            until(lambda: mounted.status()["device_state"] == "silent", "the probe finds out")
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                store(mounted.path, "refused")
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        store(mounted.path, "stored")
        assert all((mounted.path / f"{n}").read_bytes() == DATA for n in range(COUNT))


def test_a_rewrite_that_is_refused_leaves_the_block_as_it_was(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-aside] It is refused before anything is changed for it."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        names = ("emptied", "added to", "truncated")
        for name in names:
            store(mounted.path, name)
        run_kvfs("sync", str(mounted.path))
        with drive.silent():
            until(lambda: mounted.status()["device_state"] == "silent", "the probe finds out")
            for name, how in zip(names, (os.O_TRUNC, os.O_APPEND), strict=False):
                with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                    os.open(mounted.path / name, os.O_WRONLY | how)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.truncate(mounted.path / "truncated", 100)
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        run_kvfs("sync", str(mounted.path))
        for name in names:
            assert (mounted.path / name).read_bytes() == DATA
            assert os.getxattr(mounted.path / name, "user.kvfs.state") == b"published"
