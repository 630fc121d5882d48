"""The loop device of an image: its blocks are those of the drive that the image lies on."""

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import SourceBusy
from kvfs.devices import loop
from kvfs.devices.loop import attach
from tests.support.mounts.mounting import run_kvfs, workplace
from tests.support.store.stores import MIB

pytestmark = pytest.mark.needs_loop

#: linux/fs.h.
_BLKSSZGET: Final = 0x1268
#: Of the superblock: bytes of a sector (xfs_format.h, sb_sectsize), big endian.
_SECTOR_OFFSET: Final = 102


def drives_block_bytes(directory: Path) -> int | None:
    """Return the size of a block of the drive below *directory*, None if there is no one drive."""
    device = directory.stat().st_dev
    drive = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (drive / "queue", drive.resolve().parent / "queue"):
        if (told := queue / "logical_block_size").exists():
            return int(told.read_text())
    return None


@pytest.mark.parametrize("kind", ["tmpfs", "disk"])
def test_it_has_the_blocks_of_the_drive_below(kind: str) -> None:
    with workplace(kind) as place:
        image = place / "image"
        run_kvfs("mkfs", "--capacity", "300M", str(image))
        image_fd = os.open(image, os.O_RDWR)
        attached = attach(image_fd, str(image))
        try:
            raw = fcntl.ioctl(attached.fd, _BLKSSZGET, bytes(4))
            superblock = os.pread(image_fd, 512, 0)
        finally:
            os.close(attached.fd)
            os.close(image_fd)
        assert struct.unpack("i", raw)[0] == (drives_block_bytes(place) or 4096)
        assert struct.unpack_from(">H", superblock, _SECTOR_OFFSET)[0] == 4096
        assert image.stat().st_size >= 300 * MIB


def test_others_may_take_the_free_device_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def taken(*arguments: object, read_only: bool) -> bool:
        tries.append(arguments)
        raise OSError(errno.EBUSY, "taken")

    monkeypatch.setattr(loop, "_configure", taken)
    with pytest.raises(SourceBusy, match="taken by others"):
        attach(-1, "image")
    assert len(tries) == 64


def test_where_the_drive_is_not_known_the_blocks_fit_every_drive() -> None:
    fd = os.memfd_create("image")
    assert loop._block_bytes(fd) == 4096
    os.close(fd)
