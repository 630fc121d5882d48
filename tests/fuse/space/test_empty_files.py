"""Files without bytes take inodes and rows of the device: they give way to blocks with bytes."""

import os
import subprocess
import sys

import pytest

from tests.fuse.conftest import pool_source
from tests.support.clients.stepping import until
from tests.support.kernel.caches import pool_root
from tests.support.kernel.calls import write_file
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_fuse

MIB = 1 << 20
SOURCE_BYTES = 320 * MIB
CAPACITY_BYTES = 120 * MIB
#: So much is left for blocks, and others have the rest: it is the device that bounds the pool.
LEFT_BYTES = 100 * MIB
#: Names whose rows and inodes take a quarter of the capacity.
NAMES = CAPACITY_BYTES // 4 // 1574
MANY = NAMES + 3000
SLACK = 300
WAIT_S = 20.0
#: Makes files in its argument, closes them, and lives on: they are its own.
MAKER = """
import os, sys
for number in range(int(sys.argv[2])):
    os.close(os.open(f"{sys.argv[1]}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
print("made", flush=True)
sys.stdin.read()
"""


def fill_up(mounted: Mounted) -> None:
    """Let a file of others take what is left of the device, but for LEFT_BYTES."""
    root = pool_root(mounted)
    status = os.statvfs(root)
    with (root / "others").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - LEFT_BYTES)


def test_empty_files_that_are_leased_and_pinned_give_way() -> None:
    """Nothing of theirs is counted by bytes, nor by the bounds of leases and pins."""
    skip_without_mounts()
    flags = ("-o", "mode=0777", "--capacity", str(CAPACITY_BYTES), "--data-path=daemon")
    flags += ("--set", "index_preallocate_bytes=1M")
    with (
        workplace("disk") as place,
        pool_source("xfs", SOURCE_BYTES) as source,
        Mounted(source, place / "kv", *flags) as mounted,
    ):
        fill_up(mounted)
        until(lambda: mounted.status()["usable_bytes"] < CAPACITY_BYTES, "the device is full")
        theirs = mounted.path / "theirs"
        theirs.mkdir()
        os.chown(theirs, 1000, 1000)
        os.setxattr(theirs, "user.kvfs.pin", b"1")
        write_file(mounted.path / "block", b"x" * MIB)
        with subprocess.Popen(
            [sys.executable, "-c", MAKER, str(theirs), str(MANY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            user=1000,
            group=1000,
        ) as maker:
            assert maker.stdout is not None
            assert maker.stdout.readline() == b"made\n"
            until(lambda: mounted.status()["blocks"] < NAMES + SLACK, "the empty files go", WAIT_S)
            assert mounted.status()["blocks"] > NAMES - SLACK
            assert (mounted.path / "block").stat().st_size == MIB
            maker.kill()
        mounted.stop()
        assert mounted.errors() == []
