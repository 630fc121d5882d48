"""Hints by attribute on a real mount: what they keep in a flood, and who may set them."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import refused
from tests.support.mounts.mounting import Mounted, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

HINT: Final = "user.kvfs.hint"
BLOCK_BYTES: Final = 1 << 20


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    skip_without_mounts()
    with blank_place() as place:
        yield place


def store(directory: Path, name: str) -> Path:
    (directory / "x.tmp").write_bytes(bytes(BLOCK_BYTES))
    (directory / "x.tmp").rename(directory / name)
    return directory / name


def flood(mounted: Mounted, directory: Path) -> None:
    """Store three times what the pool holds."""
    for number in range(3 * int(mounted.status()["capacity_bytes"]) // BLOCK_BYTES):
        store(directory, f"flood{number}")


def test_what_a_hint_retains_outlives_a_flood(place: Path) -> None:
    """[life-hint] A directory's hint, a file's own, and what ends it."""
    with small_mount(place) as mounted:
        kv = mounted.path
        prompts, rest = kv / "prompts", kv / "rest"
        prompts.mkdir()
        rest.mkdir()
        os.setxattr(prompts, HINT, b"priority=80,session=s1")
        kept = [store(prompts, f"{number}") for number in range(4)]
        plain = [store(rest, f"{number}") for number in range(4)]
        own, none = store(rest, "own"), store(prompts, "none")
        os.setxattr(own, HINT, b"priority=1")
        os.setxattr(none, HINT, b"none")
        assert os.getxattr(kept[0], HINT) == b"priority=80,session=s1"
        assert os.getxattr(rest, HINT) == b"none"
        assert HINT not in os.listxattr(own)
        flood(mounted, rest)
        assert all(path.exists() for path in (*kept, own))
        assert not any(path.exists() for path in (*plain, none))
        assert mounted.status()["hints"]["retained_bytes"] >= 5 * BLOCK_BYTES
        mounted.stop()
        assert mounted.errors() == []


def test_a_mount_full_of_retained_blocks_takes_stores(place: Path) -> None:
    """[life-hint] A hint biases and never pins."""
    with small_mount(place) as mounted:
        os.setxattr(mounted.path, HINT, b"priority=100")
        flood(mounted, mounted.path)
        last = store(mounted.path, "last")
        assert last.exists()
        os.removexattr(mounted.path, HINT)


def test_who_may_write_may_hint(place: Path) -> None:
    """[life-hint] The owner's consent is not needed, the right to write is."""
    with small_mount(place) as mounted:
        mounted.path.chmod(0o755)
        closed, opened = store(mounted.path, "closed"), store(mounted.path, "opened")
        opened.chmod(0o666)
        with Caller(NOBODY, NOBODY) as nobody:
            nobody.os("setxattr", str(opened), HINT, b"once")
            with refused(errno.EACCES):
                nobody.os("setxattr", str(closed), HINT, b"once")
            with refused(errno.EACCES):
                nobody.os("setxattr", str(mounted.path), HINT, b"once")
        with refused(errno.EINVAL):
            os.setxattr(opened, HINT, b"priority=101")
        assert os.getxattr(opened, HINT) == b"once"
