"""One user keeps blocks from eviction in every way there is; the other goes on as if alone."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.kernel.calls import refused
from tests.support.mounts.bounded_pool import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    CREATE,
    HONEST,
    HOSTILE,
    bounded_pool,
    store_whole,
)
from tests.support.mounts.mounting import Mounted

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]

#: Blocks of the honest user: more than an equal part of the pool.
CACHE: Final = 64
#: What is kept from the hostile one: an equal part of the pool, less what is kept free in it.
SEEN_LEAST: Final = CAPACITY_BYTES // BLOCK_BYTES // 2 - 8
#: More than the pool holds.
MANY: Final = 122


@pytest.fixture(params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A pool of 96 MiB that everybody may store in."""
    with bounded_pool(request.param) as mounted:
        yield mounted


def held_bytes(pool: Mounted, uid: int = HOSTILE) -> int:
    """Return what a user keeps from eviction."""
    account = pool.status()["tenants"].get(str(uid), {"held_bytes": 0})
    return int(account["held_bytes"])


def fill(caller: Caller, directory: Path, blocks: int = CACHE) -> None:
    for number in range(blocks):
        store_whole(caller, directory / f"own{number}")


def seen(directory: Path) -> int:
    """Return how many blocks of the honest user's cache are there."""
    return sum((directory / f"own{number}").exists() for number in range(CACHE))


def goes_on(honest: Caller, directory: Path) -> None:
    """Require that the honest user stores what it wants, and finds what it stored last."""
    for number in range(2 * MANY):
        store_whole(honest, directory / f"more{number}")
        assert honest.os("stat", str(directory / f"more{number}")).st_size == BLOCK_BYTES


def draft(caller: Caller, path: Path) -> int:
    """Open a draft, write a block and do not close it; return its descriptor."""
    fd = caller.os("open", str(path), CREATE, 0o644)
    try:
        caller.os("write", fd, bytes(BLOCK_BYTES))
    except OSError:
        caller.os("close", fd)
        raise
    return int(fd)


def test_unclosed_drafts_take_no_more_than_their_part(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[held-shares] Their writer gets EDQUOT; the other has hits, and no store of it is refused."""
    fill(honest, pool.path)
    held: list[int] = []
    with refused(errno.EDQUOT):
        held.extend(draft(hostile, pool.path / f"draft{number}.tmp") for number in range(MANY))
    assert seen(pool.path) >= SEEN_LEAST
    goes_on(honest, pool.path)
    told = pool.status()["tenants"][str(HOSTILE)]
    assert told["held_bytes"] == len(held) * BLOCK_BYTES
    for number, fd in enumerate(held):
        hostile.os("unlink", str(pool.path / f"draft{number}.tmp"))
        hostile.os("close", fd)
    until(lambda: may_store(hostile, pool.path / "again"), "its share is given back")


def may_store(caller: Caller, path: Path) -> bool:
    try:
        store_whole(caller, path)
    except OSError:
        return False
    return True


def test_drafts_opened_before_they_are_written_count_as_they_grow(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[held-shares] A write that asks for more is EDQUOT; on passthrough its draft is stopped."""
    fill(honest, pool.path)
    fds = [
        hostile.os("open", str(pool.path / f"draft{number}.tmp"), CREATE, 0o644)
        for number in range(CAPACITY_BYTES // BLOCK_BYTES - CACHE)
    ]
    with refused(errno.EDQUOT, errno.ENOSPC):
        for fd in fds:
            for _ in range(MANY // len(fds)):
                hostile.os("write", fd, bytes(BLOCK_BYTES))
                hostile.os("close", hostile.os("dup", fd))  # what it took is counted now
    assert seen(pool.path) >= SEEN_LEAST
    goes_on(honest, pool.path)


def test_one_draft_that_grows_fast_takes_no_more_than_its_part(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[held-shares] Nor is more kept free for what it may take next; others keep their part."""
    half = CAPACITY_BYTES // BLOCK_BYTES // 2
    fill(honest, pool.path, half)
    fd = hostile.os("open", str(pool.path / "draft.tmp"), CREATE, 0o644)
    for _ in range(half - 8):
        hostile.os("write", fd, bytes(BLOCK_BYTES))
    hostile.os("close", hostile.os("dup", fd))
    assert seen(pool.path) >= SEEN_LEAST
    with refused(errno.EDQUOT, errno.ENOSPC):
        for _ in range(MANY):
            hostile.os("write", fd, bytes(BLOCK_BYTES))
            hostile.os("close", hostile.os("dup", fd))
    assert seen(pool.path) >= SEEN_LEAST
    goes_on(honest, pool.path)


def test_what_is_allocated_at_once_is_no_more_than_its_part(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[held-shares] Whoever asks for more is EDQUOT at once, before anything goes for it."""
    half = CAPACITY_BYTES // BLOCK_BYTES // 2
    fill(honest, pool.path, half)
    fd = hostile.os("open", str(pool.path / "draft.tmp"), CREATE, 0o644)
    with refused(errno.EDQUOT):
        hostile.os("posix_fallocate", fd, 0, CAPACITY_BYTES * 3 // 4)
    hostile.os("posix_fallocate", fd, 0, CAPACITY_BYTES // 4)
    assert seen(pool.path) >= SEEN_LEAST


def test_a_reader_holds_others_blocks_on_its_own_account(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[held-shares] Whoever opens others' blocks as they appear gets EMFILE; they store on."""
    fill(honest, pool.path)
    opened = []
    codes = set()
    for number in range(2 * MANY):
        path = pool.path / f"more{number}"
        store_whole(honest, path)
        assert honest.os("stat", str(path)).st_size == BLOCK_BYTES
        # Its owner loads it first, so that a handle is kept for the next reader.
        honest.os("close", honest.os("open", str(path), os.O_RDONLY))
        try:
            opened.append(hostile.os("open", str(path), os.O_RDONLY))
        except OSError as error:
            codes.add(error.errno)
    assert codes == {errno.EMFILE}
    told = pool.status()["tenants"]
    assert told[str(HOSTILE)]["held_bytes"] == len(opened) * BLOCK_BYTES
    assert told.get(str(HONEST), {}).get("held_bytes", 0) == 0
    fd = honest.os("open", str(path), os.O_RDONLY)
    assert len(honest.os("pread", fd, BLOCK_BYTES, 0)) == BLOCK_BYTES


def test_blocks_without_a_name_are_held_by_who_reads_them(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[held-shares] The same for its own blocks that it has removed."""
    fill(honest, pool.path)
    with refused(errno.EMFILE, errno.EDQUOT):
        for number in range(MANY):
            path = pool.path / f"nameless{number}"
            store_whole(hostile, path)
            hostile.os("open", str(path), os.O_RDONLY)
            hostile.os("unlink", str(path))
    assert seen(pool.path) >= SEEN_LEAST
    goes_on(honest, pool.path)


def test_a_leased_block_that_is_read_is_held_once(pool: Mounted, honest: Caller) -> None:
    path = str(pool.path / "in place")
    honest.os("close", draft(honest, pool.path / "in place"))
    assert os.getxattr(path, "user.kvfs.state") == b"leased"
    fd = honest.os("open", path, os.O_RDONLY)
    assert held_bytes(pool, HONEST) == BLOCK_BYTES
    honest.os("close", fd)


def test_one_user_alone_has_everything(pool: Mounted, hostile: Caller) -> None:
    """[held-shares] Nobody else loses anything: the pool is full first."""
    with refused(errno.ENOSPC):
        for number in range(MANY):
            draft(hostile, pool.path / f"draft{number}.tmp")
    assert number > CAPACITY_BYTES // BLOCK_BYTES * 9 // 10


def test_what_others_do_not_store_is_lent(pool: Mounted, hostile: Caller, honest: Caller) -> None:
    """[held-shares] All but a sixteenth, if another has stored next to nothing."""
    fill(honest, pool.path, 4)
    with refused(errno.EDQUOT):
        for number in range(MANY):
            draft(hostile, pool.path / f"draft{number}.tmp")
    assert number > CAPACITY_BYTES // BLOCK_BYTES * 8 // 10
    store_whole(honest, pool.path / "more")


def test_a_crowd_of_sub_uids_holds_what_one_user_may(tmp_path: Path, honest: Caller) -> None:
    """[held-shares] Rootless containers of one user are one tenant."""
    subuid = tmp_path / "subuid"
    subuid.write_text(f"{HOSTILE}:100000:65536\n")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(bounded_pool("daemon", "--set", f"subuid_file={subuid}"))
        crowd = [stack.enter_context(Caller(uid, uid)) for uid in range(100_000, 100_004)]
        fill(honest, pool.path)
        with refused(errno.EDQUOT):
            for number in range(MANY):
                draft(crowd[number % len(crowd)], pool.path / f"draft{number}.tmp")
        assert seen(pool.path) >= SEEN_LEAST
        goes_on(honest, pool.path)


def test_root_is_refused_by_a_full_pool_alone(pool: Mounted, honest: Caller) -> None:
    """[held-shares] An operator who copies something into the pool meets no bound."""
    fill(honest, pool.path)
    with Caller() as root, refused(errno.ENOSPC):
        for number in range(MANY):
            draft(root, pool.path / f"draft{number}.tmp")
    assert number > CAPACITY_BYTES // BLOCK_BYTES * 9 // 10
