"""A pool of 96 MiB that every uid may store in, and callers that store more than it holds."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.fuse.conftest import NOBODY, OTHER, pool_source, require_passthrough
from tests.support.clients.callers import Caller
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

BLOCK_BYTES: Final = 1 << 20
CAPACITY_BYTES: Final = 96 * BLOCK_BYTES
#: More blocks than the pool holds.
MANY: Final = 120
CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
#: So many bytes of its log are shown when a test fails.
_SHOWN: Final = 4000
#: One takes what it can get, the other what it wants.
HOSTILE, HONEST = NOBODY, OTHER


@contextlib.contextmanager
def bounded_pool(data_path: str, *more: str, kind: type[Mounted] = Mounted) -> Iterator[Mounted]:
    """Yield a mount of it on *data_path*, with *more* flags; fails when it logged an error."""
    skip_without_mounts()
    flags = [f"--data-path={data_path}", "--capacity", str(CAPACITY_BYTES), *more]
    flags += ["--set", "index_preallocate_bytes=1M", "-o", "mode=0777"]
    with (
        workplace("disk") as place,
        pool_source("tmpfs") as source,
        kind(source, place / "kv", *flags) as mounted,
    ):
        if data_path == "passthrough":
            require_passthrough(mounted)
        try:
            yield mounted
        except BaseException:
            print(mounted.log_file.read_text()[-_SHOWN:])  # it goes with the mount
            raise
        mounted.stop()
        assert mounted.errors() == []


def store(caller: Caller, path: Path) -> None:
    """Write a block of 1 MiB under *path*; raises OSError, after which nothing is left."""
    fd = caller.os("open", str(path), CREATE, 0o644)
    try:
        assert caller.os("write", fd, os.urandom(BLOCK_BYTES)) == BLOCK_BYTES
    finally:
        caller.os("close", fd)


def store_whole(caller: Caller, path: Path) -> None:
    """Store a block as connectors do; raises OSError if that is refused."""
    draft = path.with_suffix(".tmp")
    store(caller, draft)
    caller.os("rename", str(draft), str(path))
