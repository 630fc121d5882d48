"""SOURCE as fstab(5) has it for other file systems: ``UUID=`` of the pool, in every command."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli.mount_helper import mount_main, source_in_fstab, umount_main
from kvfs.core.errors import DriveMissing, SourceBusy, SourceMissing, UsageError
from kvfs.core.source_list import listed, sources_of
from kvfs.machine.mount_table import mount_at
from tests.support.devices.loop import loop_device
from tests.support.devices.pools import DRIVE_BYTES
from tests.support.mounts.mounting import Mounted, run_kvfs, workplace

UNKNOWN: Final = "UUID=00000000-0000-4000-8000-000000000000"


def refused(*arguments: str) -> tuple[int, str]:
    """Run a command that must fail; return its exit code and its one line."""
    result = run_kvfs(*arguments, check=False)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return result.returncode, line


@pytest.fixture
def drives() -> Iterator[list[str]]:
    """Two loop devices, with a pool; the UUID of each is that of its drive."""
    with ExitStack() as stack:
        yield [stack.enter_context(loop_device(DRIVE_BYTES)).path for _ in range(2)]


def made(*sources: str) -> list[str]:
    """Make a pool; return its drives as sources by UUID."""
    told = json.loads(run_kvfs("mkfs", *sources, "--json").stdout)
    return [f"UUID={drive['uuid']}" for drive in told["drives"]]


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
def test_a_pool_has_every_command_by_its_uuid(drives: list[str], tmp_path: Path) -> None:
    pool, other = made(*drives)
    with workplace("disk") as place:
        for given in (pool, other, pool.upper().replace("UUID=", 'UUID="') + '"'):
            with Mounted(given, place / "kv") as mount:
                (mount.path / "block.tmp").write_bytes(b"bytes")
                (mount.path / "block.tmp").rename(mount.path / "block")
                mount.kill_server()
                mount.follow_server()
                run_kvfs("upgrade", str(mount.path))
                # As the mount table of an XFS has it: what was found, which umount waits for.
                assert mount.status()["source"] == listed(drives)
                shown = mount_at(str(mount.path))
                assert shown is not None
                assert shown.source == listed(drives)
                code, line = refused("fsck", pool)
                assert (code, str(mount.path) in line) == (SourceBusy.exit_code, True)
                assert run_kvfs("doctor", str(mount.path), "--json", check=False).stdout
                mount.kill_daemon()
                mount.start()
                assert (mount.path / "block").read_bytes() == b"bytes"
                mount.stop()
            assert run_kvfs("fsck", given).stdout.startswith(f"{given}: 1 block")
        config = tmp_path / "kv.toml"
        config.write_text(f"source = '{pool}'\nmountpoint = '{place}/kv'\n")
        run_kvfs("mount", "--config", str(config), "--log-file", str(tmp_path / "log"))
        run_kvfs("umount", "--config", str(config))
        run_kvfs("destroy", pool, "--yes")
        assert refused("fsck", pool)[0] == SourceMissing.exit_code
        assert all(subprocess.run(["blkid", "-p", each], check=False).returncode for each in drives)


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
def test_a_pool_whose_first_drive_is_gone_has_the_uuids_of_others() -> None:
    with ExitStack() as stack, workplace("disk") as place:
        stays = stack.enter_context(loop_device(DRIVE_BYTES))
        with loop_device(DRIVE_BYTES) as goes:
            pool, other = made(goes.path, stays.path)
            with Mounted(pool, place / "kv") as mount:
                for number in range(8):
                    (mount.path / f"{number}.tmp").write_bytes(b"bytes")
                    (mount.path / f"{number}.tmp").rename(mount.path / f"{number}")
        code, line = refused("fsck", pool)
        assert (code, "no device here has this UUID" in line) == (SourceMissing.exit_code, True)
        for given in (other, f"{pool},{other}"):
            checked = run_kvfs("fsck", given, check=False)
            assert checked.returncode == DriveMissing.exit_code
            with Mounted(given, place / "kv") as mount:
                assert mount.status()["source"] == stays.path
                assert mount.status()["drives"]["0"]["state"] == "missing"
                assert {(mount.path / name).read_bytes() for name in os.listdir(mount.path)} == {
                    b"bytes"
                }


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
def test_a_line_of_fstab_names_the_pool(tmp_path: Path) -> None:
    """mount(8) gives the helper the device of ``UUID=``, and leaves ``kvfs#`` to it."""
    with loop_device(DRIVE_BYTES) as drive, workplace("disk") as place:
        (pool,) = made(drive.path)
        (place / "kv").mkdir()
        for given in (pool, pool.replace("UUID=", "kvfs#"), f"kvfs#{drive.path}"):
            assert mount_main([given, str(place / "kv"), "-o", "noatime"]) == 0
            shown = mount_at(str(place / "kv"))
            assert shown is not None
            assert shown.source == drive.path
            assert umount_main([str(place / "kv")]) == 0
        run_kvfs("destroy", pool, "--yes")


def test_what_kvfs_leaves_to_itself_in_fstab() -> None:
    assert source_in_fstab("kvfs#0123-4567") == "UUID=0123-4567"
    assert source_in_fstab("kvfs#UUID=0123") == "UUID=0123"
    assert source_in_fstab("kvfs#/dev/a,/dev/b") == "/dev/a,/dev/b"
    assert source_in_fstab("/dev/a") == "/dev/a"
    assert sources_of("UUID=1,/dev/b,UUID=2") == ("UUID=1", "/dev/b", "UUID=2")


def test_a_uuid_that_no_device_has_is_a_missing_source(tmp_path: Path) -> None:
    """It is never taken for a name: no image file is made of it."""
    for command in (
        ("mount", UNKNOWN, str(tmp_path), "--capacity=1G", "--log-file", os.devnull),
        ("fsck", UNKNOWN),
        ("destroy", UNKNOWN, "--yes"),
        ("fsck", "UUID="),
    ):
        code, line = refused(*command)
        assert code == SourceMissing.exit_code
        assert "no device here has this UUID" in line
    code, line = refused("mkfs", UNKNOWN, "--capacity=1G")
    assert code == UsageError.exit_code
    assert "give the device or file itself" in line


@pytest.mark.needs_loop
def test_a_uuid_that_two_devices_have_is_not_guessed(tmp_path: Path) -> None:
    with loop_device(DRIVE_BYTES) as drive:
        (pool,) = made(drive.path)
        shutil.copy(drive.backing, tmp_path / "copy")
        with loop_device(0, backing=tmp_path / "copy") as twin:
            code, line = refused("fsck", pool)
            assert code == SourceMissing.exit_code
            assert drive.path in line
            assert twin.path in line
            assert "they are copies" in line
        assert "no problem" in run_kvfs("fsck", pool).stdout


@pytest.mark.needs_loop
def test_destroy_by_uuid_wants_all_drives_there(drives: list[str]) -> None:
    """What is left of the pool stays as it is."""
    pool, other = made(*drives)
    with Path(drives[1]).open("r+b") as file:
        header = file.read(4096)
        file.seek(0)
        file.write(bytes(4096))
    code, line = refused("destroy", pool, "--yes")
    assert (code, "of a pool of 2: name all of them" in line) == (UsageError.exit_code, True)
    with Path(drives[1]).open("r+b") as file:
        file.write(header)
    run_kvfs("destroy", other, "--yes")
    assert refused("fsck", pool)[0] == SourceMissing.exit_code
