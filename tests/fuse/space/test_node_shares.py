"""One user's directories and symlinks take from no other user: each has a share of their bound."""

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from tests.fuse.conftest import pool_source
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import refused
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_fuse

#: Of which all users' nodes take 8 MiB: some 1,500 symlinks.
CAPACITY = "32M"
SYMLINK_MOST_BYTES = 8 << 10
SYMLINKS = (8 << 20) // SYMLINK_MOST_BYTES
MANY = 10 * SYMLINKS


@pytest.fixture
def mounted() -> Iterator[Mounted]:
    skip_without_mounts()
    flags = ("--data-path=daemon", "--capacity", CAPACITY, "-o", "mode=0777")
    flags += ("--set", "index_preallocate_bytes=1M")
    with (
        workplace("disk") as place,
        pool_source("tmpfs") as source,
        Mounted(source, place / "kv", *flags) as running,
    ):
        yield running
        running.stop()
        assert running.errors() == []


def until_refused(call: Callable[[int], None]) -> int:
    """Return how often *call* was carried out before it was ENOSPC."""
    for number in range(MANY):
        try:
            call(number)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return number
    raise AssertionError("refused nothing")


def test_a_user_of_many_symlinks_is_refused_and_no_other_user(mounted: Mounted) -> None:
    """[symlinks] [mkdir] ENOSPC for who has more than an equal share; files are made on."""
    kv = mounted.path
    with Caller(1000, 1000) as greedy, Caller(1001, 1001) as other:
        greedy.os("mkdir", f"{kv}/greedy")
        made = until_refused(lambda n: greedy.os("symlink", "to", f"{kv}/greedy/{n}"))
        assert made > SYMLINKS
        with refused(errno.ENOSPC):
            greedy.os("mkdir", f"{kv}/greedy/d")
        fd = greedy.os("open", f"{kv}/greedy/file", os.O_WRONLY | os.O_CREAT, 0o644)
        assert greedy.os("write", fd, b"x" * 100_000) == 100_000
        greedy.os("close", fd)
        other.os("mkdir", f"{kv}/other")
        # Of two users each has a half.
        assert until_refused(lambda n: other.os("mkdir", f"{kv}/other/{n}")) > SYMLINKS / 2
        for number in range(made):
            greedy.os("unlink", f"{kv}/greedy/{number}")
        other.os("mkdir", f"{kv}/other/again")
        greedy.os("symlink", "to", f"{kv}/greedy/again")
