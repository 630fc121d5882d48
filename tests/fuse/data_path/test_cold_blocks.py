"""Blocks that the kernel has not in memory: what lacks them has them fetched, and is done again."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.mounts.mounting import Mounted, loop_device, run_kvfs, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

DEVICE_BYTES: Final = 400 << 20
COUNT: Final = 32
PAGE: Final = 4096


def content(number: int) -> bytes:
    return bytes([number]) * (50_000 + number)


@pytest.fixture(params=["daemon", "passthrough"])
def cold(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount with some blocks, of which the kernel knows nothing: its device was unmounted."""
    with (
        workplace() as place,
        loop_device(DEVICE_BYTES) as device,
        Mounted(device, place / "kv", f"--data-path={request.param}") as mounted,
    ):
        if request.param == "passthrough":
            require_passthrough(mounted)
        for number in range(COUNT):
            (mounted.path / "tmp").write_bytes(content(number))
            (mounted.path / "tmp").rename(mounted.path / f"{number}")
        with (mounted.path / "sparse").open("xb") as file:
            file.write(b"head")
            file.seek(64 * PAGE)
            file.write(b"tail")
        run_kvfs("sync", str(mounted.path))
        mounted.stop()
        mounted.start()
        yield mounted


def test_all_are_loaded_at_once(cold: Mounted) -> None:
    def load(number: int) -> bytes:
        return (cold.path / f"{number}").read_bytes()

    with ThreadPoolExecutor(COUNT) as pool:
        assert list(pool.map(load, range(COUNT))) == [content(number) for number in range(COUNT)]


def test_data_and_holes_are_found_by_the_first_call(cold: Mounted) -> None:
    """On the daemon path an open opens no extent: the seek does. Nobody else may answer it."""
    fd = os.open(cold.path / "sparse", os.O_RDONLY)
    try:
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
        assert PAGE <= hole <= 64 * PAGE
        assert os.lseek(fd, hole, os.SEEK_DATA) in (hole, 64 * PAGE)
        with pytest.raises(OSError, match="No such device or address"):
            os.lseek(fd, 1 << 30, os.SEEK_DATA)
    finally:
        os.close(fd)


def _append(path: Path) -> bytes:
    with path.open("ab") as file:
        file.write(b"more")
    return content(1) + b"more"


def _overwrite(path: Path) -> bytes:
    with path.open("r+b") as file:
        file.write(b"other")
    return b"other" + content(1)[5:]


def _rewrite(path: Path) -> bytes:
    path.write_bytes(b"anew")
    return b"anew"


def _cut(path: Path) -> bytes:
    os.truncate(path, 10_000)
    return content(1)[:10_000]


def _grow(path: Path) -> bytes:
    os.truncate(path, 60_000)
    return content(1).ljust(60_000, b"\0")


def _set_times(path: Path) -> bytes:
    os.utime(path, ns=(1_000, 2_000))
    assert path.stat().st_mtime_ns == 2_000
    return content(1)


def _narrow(path: Path) -> bytes:
    path.chmod(0o600)
    return content(1)


@pytest.mark.parametrize(
    "change", [_append, _overwrite, _rewrite, _cut, _grow, _set_times, _narrow]
)
def test_a_cold_block_is_changed(cold: Mounted, change: Callable[[Path], bytes]) -> None:
    path = cold.path / "1"
    expected = change(path)
    assert path.read_bytes() == expected
    assert path.stat().st_size == len(expected)
    cold.stop()
    cold.start()
    assert path.read_bytes() == expected


def test_the_checksum_of_a_cold_block_is_told(cold: Mounted) -> None:
    value = os.getxattr(cold.path / "2", "user.kvfs.crc32c")
    assert len(value) == len("00000000")
    int(value, 16)
