"""A server with few descriptors: one user cannot take all, and without any nothing is guessed."""

import contextlib
import errno
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import NOBODY, OTHER, require_passthrough
from tests.fuse.life.test_dying_writers import GONE_WAIT_S
from tests.support.clients.callers import Caller
from tests.support.clients.stamped import stamped, state
from tests.support.clients.stepping import Stepping, until
from tests.support.clients.writers import SIZE
from tests.support.kernel.calls import read_file
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]
#: The fewest that a server starts with.
FILES: Final = 1024
#: Of them, what all clients' files may cost together (kvfs/machine/process_limits.py).
CLIENTS: Final = 128
SHARE: Final = 0.1
HALF: Final = 0.5
SUB_UIDS: Final = range(100_000, 165_536)
CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FEW_FILES: Final = ("sh", "-c", f'ulimit -S -n {FILES}; exec "$@"', "sh")


@contextlib.contextmanager
def mounted_with_few(data_path: str, share: float, *more: str) -> Iterator[Mounted]:
    """A mount whose server may have 1024 files open, each user *share* of what is for clients."""
    skip_without_mounts()
    flags = (f"--data-path={data_path}", "--set", f"open_files_max={FILES}")
    for setting in (f"open_files_user_share={share}", *more):
        flags += ("--set", setting)
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with Mounted(source / "pool", directory / "kv", *flags, prefix=FEW_FILES) as mount:
            if data_path == "passthrough":
                require_passthrough(mount)
            os.chmod(mount.path, 0o777)
            yield mount
            mount.stop()


@pytest.fixture(params=["daemon", "passthrough"])
def few(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """Such a mount on each data path."""
    with mounted_with_few(request.param, SHARE) as mount:
        yield mount


@pytest.fixture(params=["daemon", "passthrough"])
def halved(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """One whose users may have half of what is for clients, as by default."""
    with mounted_with_few(request.param, HALF) as mount:
        yield mount


def open_until_refused(caller: Caller, prefix: Path) -> tuple[list[int], int]:
    """Create files as *caller*, up to a refusal; return the descriptors and the errno."""
    held: list[int] = []
    for number in range(2 * FILES):
        try:
            held.append(caller.os("open", f"{prefix}-{number}", CREATE, 0o644))
        except OSError as error:
            return held, error.errno or 0
    raise AssertionError("nobody was refused")


def test_a_user_has_his_share_and_others_go_on(few: Mounted) -> None:
    """[open-shares] EMFILE for him, until he closes one; root and other users notice nothing."""
    with Caller(NOBODY, NOBODY) as greedy, Caller(OTHER, OTHER) as other, Caller() as root:
        held, code = open_until_refused(greedy, few.path / "greedy")
        assert code == errno.EMFILE
        assert len(held) == int(CLIENTS * SHARE)
        with pytest.raises(OSError, match=f"{errno.EMFILE}"):
            greedy.os("open", str(few.path / "greedy-0"), os.O_WRONLY)
        for caller, name in ((other, "other"), (root, "root")):
            caller.os("close", caller.os("open", str(few.path / name), CREATE, 0o644))
        greedy.os("close", held.pop())
        until(lambda: may_create(greedy, few.path / "again"), "a share that was given back")
        assert may_create(root, few.path / "of-root")


def test_two_users_leave_some_for_others_for_root_and_for_the_server(halved: Mounted) -> None:
    """[open-shares] Two have all that is for everybody; others store, and `kvfs status` answers."""
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(Caller(uid, uid)) for uid in (NOBODY, OTHER)]
        taken = [open_until_refused(one, halved.path / f"greedy-{one.uid}") for one in greedy]
        assert [code for _, code in taken] == [errno.EMFILE, errno.EMFILE]
        assert sum(len(held) for held, _ in taken) == CLIENTS * 3 // 4
        for uid in (0, *range(2000, 2004)):
            caller = stack.enter_context(Caller(uid, uid))
            assert may_create(caller, halved.path / f"of-{uid}")
        assert halved.status()["blocks"]
        assert run_kvfs("status", str(halved.path)).returncode == 0
        # Others have few each, and all of them together leave some for root.
        few = [stack.enter_context(Caller(uid, uid)) for uid in range(3000, 3012)]
        opened = [open_until_refused(one, halved.path / f"few-{one.uid}") for one in few]
        counts = [len(held) for held, _ in opened]
        assert counts[0] == CLIENTS // 64
        assert sum(counts) == CLIENTS // 8
        root = stack.enter_context(Caller())
        held, code = open_until_refused(root, halved.path / "root")
        assert (len(held), code) == (CLIENTS // 8, errno.EMFILE)
        assert halved.status()["blocks"]


def test_processes_that_are_watched_leave_some_for_files(halved: Mounted) -> None:
    """[open-shares] A block that is closed in place belongs to its process, which is watched."""
    with contextlib.ExitStack() as stack:
        for number in range(3 * FILES // 16):
            caller = stack.enter_context(Caller(NOBODY, NOBODY))
            fd = caller.os("open", str(halved.path / f"{number}"), CREATE, 0o644)
            caller.os("write", fd, b"leased")
            caller.os("close", fd)
        assert pidfds_of(halved.server_pid) <= FILES // 16 + 8
        assert state(halved.path / "0") == "leased"
        assert state(halved.path / f"{number}") == "leased"


def pidfds_of(pid: int) -> int:
    """Return how many processes *pid* has a descriptor of."""
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sum("pidfd" in link for link in links)


def may_create(caller: Caller, path: Path) -> bool:
    try:
        caller.os("close", caller.os("open", str(path), CREATE, 0o644))
    except OSError:
        return False
    return True


def test_readers_have_a_share_where_they_cost_a_descriptor(few: Mounted) -> None:
    """[open-shares] On the daemon path; with passthrough the kernel has the extent open."""
    with Caller() as root, Caller(NOBODY, NOBODY) as greedy:
        count = int(CLIENTS * SHARE) + 8
        for number in range(count):
            path = str(few.path / f"block-{number}")
            fd = root.os("open", path, CREATE, 0o644)
            root.os("write", fd, b"bytes")
            root.os("close", fd)
        daemon = few.status()["data_path"] == "daemon"
        paths = [str(few.path / f"block-{number}") for number in range(count)]
        allowed = int(CLIENTS * SHARE) if daemon else count
        held = [greedy.os("open", path, os.O_RDONLY) for path in paths[:allowed]]
        for path in paths[allowed:]:
            with pytest.raises(OSError, match=f"{errno.EMFILE}"):
                greedy.os("open", path, os.O_RDONLY)
        assert greedy.os("pread", held[-1], 5, 0) == b"bytes"


def test_killed_writers_are_torn_by_a_server_without_descriptors(few: Mounted) -> None:
    """[life-torn] A look that fails is no proof of life."""
    with contextlib.ExitStack() as stack, Caller() as root:
        writers = [
            stack.enter_context(
                Stepping("tests.support.clients.writers", "waits", few.path / f"torn-{number}")
            )
            for number in range(3)
        ]
        whole = stack.enter_context(
            Stepping("tests.support.clients.writers", "duplicates", few.path / "block")
        )
        for writer in (*writers, whole):
            assert writer.at() == "half"
        with without_descriptors(few.server_pid):
            with pytest.raises(OSError, match=f"{errno.EMFILE}"):
                root.os("open", str(few.path / "refused"), CREATE, 0o644)
            for writer in writers:
                writer.kill()
            whole.to("written")
            whole.to("closed")
            until(
                lambda: not [name for name in os.listdir(few.path) if name.startswith("torn")],
                "the torn blocks disappear",
                GONE_WAIT_S,
            )
        until(lambda: state(few.path / "block") == "leased", "whole", GONE_WAIT_S)
        assert read_file(few.path / "block") == stamped("block", SIZE)


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Let process *pid* open nothing more: all numbers below its limit are taken."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_range_of_sub_uids_is_one_tenant(tmp_path: Path) -> None:
    """[open-shares] However many uids a user's containers run as, they have one user's share."""
    subuid = tmp_path / "subuid"
    subuid.write_text(f"{NOBODY}:{SUB_UIDS[0]}:{len(SUB_UIDS)}\n")
    mounted = mounted_with_few("daemon", SHARE, f"subuid_file={subuid}")
    with mounted as mount, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Caller(uid, uid)) for uid in SUB_UIDS[:4]]
        taken = [open_until_refused(one, mount.path / f"crowd-{one.uid}") for one in crowd]
        assert [code for _, code in taken] == [errno.EMFILE] * 4
        assert [len(held) for held, _ in taken] == [int(CLIENTS * SHARE), 0, 0, 0]
        owner, other = (stack.enter_context(Caller(uid, uid)) for uid in (NOBODY, OTHER))
        assert not may_create(owner, mount.path / "of-owner")
        assert may_create(other, mount.path / "of-other")
        account = mount.status()["tenants"][str(NOBODY)]
        assert account["open_files"] == int(CLIENTS * SHARE)
