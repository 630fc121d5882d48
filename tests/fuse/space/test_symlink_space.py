"""What symlinks took of the device comes back for blocks when they are gone."""

import errno
import os

import pytest

from tests.fuse.conftest import pool_source
from tests.support.clients.callers import Caller
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_fuse

MIB = 1 << 20
SOURCE_BYTES = 320 * MIB
#: Long ones, each two pages of the index: all that a user may make of them take 30 MiB there.
TARGET = "t" * 4000
MOST = 10_000


def test_room_comes_back_after_many_symlinks() -> None:
    """data.mdb gives its free pages back at the next start, and blocks have their room."""
    skip_without_mounts()
    flags = ("-o", "mode=0777", "--set", "index_preallocate_bytes=1M")
    with (
        workplace("disk") as place,
        pool_source("xfs", SOURCE_BYTES) as source,
        Mounted(source, place / "kv", *flags) as mounted,
    ):
        before = mounted.status()["usable_bytes"]
        free_before = os.statvfs(mounted.path).f_bavail
        with Caller(1000, 1000) as user:
            made = 0
            try:
                for made in range(MOST):
                    user.os("symlink", TARGET, f"{mounted.path}/{made}")
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            assert 1000 < made < MOST - 1
            for number in range(made):
                user.os("unlink", f"{mounted.path}/{number}")
        mounted.remount()
        assert mounted.status()["usable_bytes"] >= before
        assert os.statvfs(mounted.path).f_bavail >= free_before
        mounted.stop()
        assert mounted.errors() == []
