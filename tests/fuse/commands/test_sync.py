"""``kvfs sync`` on a real mount: it waits for what was published below its paths, and says so."""

import ctypes
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.client.control_socket import ask
from kvfs.core.errors import PathMissing, SyncedTooLittle, UsageError
from kvfs.core.mount_name import name_of, socket_path
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

BLOCK_BYTES = 1 << 16
LIBC = ctypes.CDLL(None, use_errno=True)
#: The last is a second more than a week.
WRONG_TIMES = ("soon", "-3", "nan", "inf", "604801")
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture(scope="module")
def mounted() -> Iterator[Mounted]:
    """A mount whose pass does nothing by itself."""
    skip_without_mounts()
    with (
        blank_place() as place,
        small_mount(place, "--set", "durable_within_s=0") as mounted,
    ):
        yield mounted
        mounted.stop()


def store(directory: Path, count: int) -> None:
    directory.mkdir(exist_ok=True)
    for number in range(count):
        draft = directory / f"{number}.tmp"
        draft.write_bytes(os.urandom(BLOCK_BYTES))
        draft.rename(directory / f"{number}.data")


def waiting(mounted: Mounted) -> int:
    found = mounted.status()["durability"]["blocks"]
    assert isinstance(found, int)
    return found


def mapped(fd: int) -> ctypes.c_void_p:
    """Map the file without a descriptor that goes on living, as ``mmap.mmap`` keeps one."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = LIBC.mmap(None, BLOCK_BYTES, access, mmap.MAP_SHARED, fd, 0)
    return ctypes.c_void_p(address)


def sync(*arguments: str | Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run_kvfs("sync", "--json", *map(str, arguments)).stdout)
    return told


def test_it_waits_for_all_that_is_published(mounted: Mounted) -> None:
    store(mounted.path / "a", 20)
    assert waiting(mounted) == 20
    with (mounted.path / "draft").open("wb") as draft:
        draft.write(b"x" * BLOCK_BYTES)
        told = sync(mounted.path)
    assert (told["blocks"], told["bytes"]) == (20, 20 * BLOCK_BYTES)
    assert (told["left_blocks"], told["held_blocks"]) == (0, 0)
    assert told["mountpoint"] == str(mounted.path)
    assert waiting(mounted) == 1, "the draft, which was published since"
    said = run_kvfs("sync", str(mounted.path)).stdout
    assert said.startswith("1 block, 64 KiB had to be written;")
    assert sync(mounted.path)["blocks"] == 0


def test_it_counts_what_lies_below_its_paths(mounted: Mounted) -> None:
    for name, count in (("b", 3), ("c", 4)):
        store(mounted.path / name, count)
    assert sync(mounted.path / "b")["blocks"] == 3
    sync(mounted.path)
    store(mounted.path / "c", 2)
    assert sync(mounted.path / "b", mounted.path / "c" / "0.data")["blocks"] == 1
    sync(mounted.path)


def test_what_a_process_may_still_write_is_told(mounted: Mounted) -> None:
    """With passthrough a mapping outlives its close, and no request tells of it."""
    if mounted.status()["data_path"] != "passthrough":
        pytest.skip("on the daemon path the close waits for the mapping")
    block = mounted.path / "mapped"
    with block.open("w+b") as file:
        file.write(b"x" * BLOCK_BYTES)
        file.flush()
        mapping = mapped(file.fileno())
    failed = run_kvfs("sync", str(mounted.path), check=False)
    assert failed.returncode == SyncedTooLittle.exit_code
    assert "1 block not durable: a process has them mapped" in failed.stderr
    ctypes.memmove(mapping, b"new", 3)
    assert LIBC.munmap(mapping, BLOCK_BYTES) == 0
    assert sync(mounted.path)["held_blocks"] == 0
    assert waiting(mounted) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("{kv}/nothing",), PathMissing),
        *((("{kv}", "--timeout", wrong), UsageError) for wrong in WRONG_TIMES),
    ],
)
def test_what_it_cannot_do_it_says_in_a_line(
    mounted: Mounted, arguments: tuple[str, ...], error: type[PathMissing]
) -> None:
    wanted = [argument.format(kv=mounted.path) for argument in arguments]
    failed = run_kvfs("sync", *wanted, check=False)
    assert failed.returncode == error.exit_code
    assert len(failed.stderr.splitlines()) == 1


def test_time_that_is_over_is_an_error(mounted: Mounted) -> None:
    store(mounted.path / "d", 5)
    failed = run_kvfs("sync", "--timeout", "0", str(mounted.path), check=False)
    assert failed.returncode == SyncedTooLittle.exit_code
    assert "not durable after 0 s" in failed.stderr


def test_names_that_wait_are_no_blocks(mounted: Mounted) -> None:
    """Every block is durable, and the flush behind the last name takes longer than no time."""
    sync(mounted.path)
    (mounted.path / "directory").mkdir()
    failed = run_kvfs("sync", "--timeout", "0", str(mounted.path), check=False)
    assert failed.returncode == SyncedTooLittle.exit_code
    assert failed.stderr == "kvfs: the names are not durable after 0 s\n"
    assert sync(mounted.path)["left_blocks"] == 0


def asked(mounted: Mounted, verb: str, **args: object) -> dict[str, Any]:
    return ask(socket_path(name_of(str(mounted.path))), verb, args)


def test_of_many_waits_the_oldest_is_forgotten(mounted: Mounted) -> None:
    """Its client asks for a new one."""
    waits = [asked(mounted, "sync")["wait"] for _ in range(65)]
    assert asked(mounted, "synced", wait=waits[0]) == {"gone": True}
    assert "gone" not in asked(mounted, "synced", wait=waits[1])
