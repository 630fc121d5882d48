"""Commands that take the drives of one pool: each does it whole, or says in one line why not."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import DriveMissing, SourceBlank, SourceForeign, SourceMissing, UsageError
from tests.support.devices.loop import loop_device
from tests.support.devices.pools import DRIVE_BYTES
from tests.support.mounts.mounting import Mounted, own_tmpfs, run_kvfs, workplace

pytestmark = pytest.mark.needs_fuse

DRIVES: Final = 2


@pytest.fixture
def drives() -> Iterator[list[str]]:
    """Blank directories, each in memory of its own."""
    with ExitStack() as stack:
        yield [str(stack.enter_context(own_tmpfs())) for _ in range(DRIVES)]


def refused(*arguments: str) -> tuple[int, str]:
    """Run a command that must fail; return its exit code and its one line."""
    result = run_kvfs(*arguments, check=False)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return result.returncode, line


def test_mkfs_tells_what_it_made(drives: list[str]) -> None:
    told = json.loads(run_kvfs("mkfs", *drives, "--capacity=128M", "--json").stdout)
    assert [(one["drive"], one["source"], one["capacity_bytes"]) for one in told["drives"]] == [
        (number, source, 64 << 20) for number, source in enumerate(drives)
    ]
    assert told["uuid"] == told["drives"][0]["uuid"] != told["drives"][1]["uuid"]
    heading, *rows = run_kvfs("mkfs", *drives, "--force").stdout.splitlines()
    assert heading.split() == ["drive", "capacity", "UUID", "source"]
    assert [row.split()[-1] for row in rows] == drives
    assert run_kvfs("mkfs", drives[0], "--force").stdout == ""


def test_a_part_of_a_pool_is_refused_in_one_line(drives: list[str], tmp_path: Path) -> None:
    first, second = drives
    assert refused("mkfs", first, first)[0] == UsageError.exit_code
    code, line = refused("fsck", first, second)
    assert (code, line) == (SourceBlank.exit_code, f"kvfs: {first} is not a kvfs pool: it is empty")
    told = json.loads(run_kvfs("mkfs", first, second, "--json").stdout)
    code, line = refused("mkfs", first, second)
    assert (code, "--force overwrites it" in line) == (SourceForeign.exit_code, True)
    missing = told["drives"][1]["uuid"]
    log = ("--log-file", os.devnull)
    code, line = refused("mount", first, str(tmp_path), "--all-drives", *log)
    assert code == SourceMissing.exit_code
    assert f"drive 1 (UUID {missing}) cannot be found" in line
    code, line = refused("mount", second, str(tmp_path), "--all-drives", *log)
    assert (code, "drive 0 (UUID" in line) == (SourceMissing.exit_code, True)
    alone = run_kvfs("fsck", first, check=False)
    assert alone.returncode == DriveMissing.exit_code
    assert f"drive 1 (UUID {missing})" in alone.stdout + alone.stderr
    code, line = refused("destroy", first, "--yes")
    assert code == UsageError.exit_code
    assert "drive 0 of a pool of 2: name all of them" in line
    assert "no problem" in run_kvfs("fsck", second, first).stdout
    assert json.loads(run_kvfs("fsck", first, second, "--json").stdout)["found"] == 0
    run_kvfs("destroy", second, first, "--yes")
    assert [os.listdir(drive) for drive in drives] == [[], []]


def test_a_mount_in_use_is_named(drives: list[str]) -> None:
    """By any of its drives, as the mount table shows them all."""
    with workplace("disk") as place, Mounted(",".join(drives), place / "kv") as mount:
        for drive in drives:
            for command in (("fsck", drive), ("mkfs", drive, "--force")):
                code, line = refused(*command)
                assert f"{drive} is in use: the pool is mounted at {mount.path}" in line, code
        code, line = refused("fsck", str(mount.path))
        assert line.endswith(f"give the source of the mount, {','.join(drives)}")
        mount.stop()
        assert run_kvfs("fsck", ",".join(drives)).returncode == 0


def test_blank_sources_become_a_pool_and_a_file_may_name_them(drives: list[str]) -> None:
    with workplace("disk") as place:
        config = place / "kv.toml"
        config.write_text(f'source = "{",".join(drives)}"\nmountpoint = "{place}/kv"\n')
        (place / "kv").mkdir()
        log = ("--log-file", str(place / "log"))
        run_kvfs("mount", "--config", str(config), *log)
        (place / "kv" / "block").write_bytes(b"bytes")
        run_kvfs("umount", str(place / "kv"))
        run_kvfs("mount", *reversed(drives), str(place / "kv"), *log)
        assert (place / "kv" / "block").read_bytes() == b"bytes"
        run_kvfs("umount", str(place / "kv"))


def store_and_be_killed(mount: Mounted, word: str) -> None:
    """Have servers followed, and all processes killed: what was stored is there, on both drives."""
    data = {f"{number}": f"{word} {number}".encode() * 10_000 for number in range(8)}
    for name, block in data.items():
        (mount.path / f"{name}.tmp").write_bytes(block)
        (mount.path / f"{name}.tmp").rename(mount.path / name)
    mount.kill_server()
    mount.follow_server()
    assert min(drive["blocks"] for drive in mount.status()["drives"].values()) > 0
    assert {name: (mount.path / name).read_bytes() for name in data} == data
    mount.kill_daemon()
    mount.start()
    assert {name: (mount.path / name).read_bytes() for name in data} == data


@pytest.mark.needs_loop
def test_other_drives_are_found_by_their_uuids() -> None:
    """And all are free again right after the umount."""
    with (
        workplace("disk") as place,
        loop_device(DRIVE_BYTES) as first,
        loop_device(DRIVE_BYTES) as second,
    ):
        run_kvfs("mkfs", first.path, second.path)
        for given in (first.path, second.path):
            with Mounted(given, place / "kv") as mount:
                assert mount.status()["source"] == f"{first.path},{second.path}"
                store_and_be_killed(mount, given)
                mount.stop()
            assert "no problem" in run_kvfs("fsck", given).stdout
        run_kvfs("destroy", first.path, second.path, "--yes")
