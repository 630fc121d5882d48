"""A server with few descriptors: one user cannot take all, and without any nothing is guessed."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import NOBODY, OTHER, require_passthrough
from tests.fuse.test_life_dying import GONE_WAIT_S
from tests.support.callers import Caller
from tests.support.calls import read_file
from tests.support.mounting import Mounted, skip_without_mounts, workplace
from tests.support.stamped import stamped, state
from tests.support.stepping import Stepping, until
from tests.support.writers import SIZE

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]
#: The fewest that a server starts with.
FILES: Final = 1024
SHARE: Final = 0.1
CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FEW_FILES: Final = ("sh", "-c", f'ulimit -S -n {FILES}; exec "$@"', "sh")


@pytest.fixture(params=["daemon", "passthrough"])
def few(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount whose server may have 1024 files open."""
    skip_without_mounts()
    flags = (f"--data-path={request.param}", "--set", f"open_files_max={FILES}")
    flags += ("--set", f"open_files_user_share={SHARE}")
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with Mounted(source / "pool", directory / "kv", *flags, prefix=FEW_FILES) as mount:
            if request.param == "passthrough":
                require_passthrough(mount)
            os.chmod(mount.path, 0o777)
            yield mount
            mount.stop()


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
        assert len(held) == int(FILES * SHARE)
        with pytest.raises(OSError, match=f"{errno.EMFILE}"):
            greedy.os("open", str(few.path / "greedy-0"), os.O_WRONLY)
        for caller, name in ((other, "other"), (root, "root")):
            caller.os("close", caller.os("open", str(few.path / name), CREATE, 0o644))
        greedy.os("close", held.pop())
        until(lambda: may_create(greedy, few.path / "again"), "a share that was given back")
        assert may_create(root, few.path / "of-root")


def may_create(caller: Caller, path: Path) -> bool:
    try:
        caller.os("close", caller.os("open", str(path), CREATE, 0o644))
    except OSError:
        return False
    return True


def test_readers_have_a_share_where_they_cost_a_descriptor(few: Mounted) -> None:
    """[open-shares] On the daemon path; with passthrough the kernel has the extent open."""
    with Caller() as root, Caller(NOBODY, NOBODY) as greedy:
        count = int(FILES * SHARE) + 8
        for number in range(count):
            path = str(few.path / f"block-{number}")
            fd = root.os("open", path, CREATE, 0o644)
            root.os("write", fd, b"bytes")
            root.os("close", fd)
        daemon = few.status()["data_path"] == "daemon"
        paths = [str(few.path / f"block-{number}") for number in range(count)]
        allowed = int(FILES * SHARE) if daemon else count
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
                Stepping("tests.support.writers", "waits", few.path / f"torn-{number}")
            )
            for number in range(3)
        ]
        whole = stack.enter_context(
            Stepping("tests.support.writers", "duplicates", few.path / "block")
        )
        for writer in (*writers, whole):
            assert writer.at() == "half"
        held, code = open_until_refused(root, few.path / "taken")
        assert code == errno.EMFILE
        for writer in writers:
            writer.kill()
        whole.to("written")
        whole.to("closed")
        until(
            lambda: not [name for name in os.listdir(few.path) if name.startswith("torn")],
            "the torn blocks disappear",
            GONE_WAIT_S,
        )
        for fd in held:
            root.os("close", fd)
        until(lambda: state(few.path / "block") == "leased", "whole", GONE_WAIT_S)
        assert read_file(few.path / "block") == stamped("block", SIZE)
