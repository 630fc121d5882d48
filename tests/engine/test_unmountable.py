"""An XFS that the kernel does not mount: the line says why, and what helps."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvfs.core.errors import SourceBusy, SourceDamaged, SourceForeign
from kvfs.devices import format_source, open_source, wait_released
from tests.support.mounts.mounting import loop_device, mounted_at

pytestmark = pytest.mark.needs_loop

IMAGE_BYTES = 512 << 20
#: Where xfs_dsb has sb_inprogress.
IN_PROGRESS = 126


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An image that holds a pool."""
    path = tmp_path / "pool.img"
    format_source(str(path), size_bytes=IMAGE_BYTES, fill=lambda _: None)
    return path


def test_sectors_smaller_than_the_devices_are_named(pool: Path) -> None:
    subprocess.run(["mkfs.xfs", "-q", "-f", "-s", "size=512", "-L", "kvfs", pool], check=True)
    command = ["losetup", "--find", "--show", "--sector-size=4096", pool]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    device = shown.stdout.strip()
    try:
        with pytest.raises(SourceDamaged, match=r"sectors of 512 bytes, .* sectors of 4096"):
            open_source(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_copy_of_a_pool_in_use_is_named(pool: Path) -> None:
    copy = pool.with_name("copy.img")
    shutil.copy(pool, copy)
    device = open_source(str(pool))
    try:
        with pytest.raises(SourceBusy, match="is a copy of the pool on /dev/loop"):
            open_source(str(copy))
    finally:
        device.close()
    wait_released(str(copy))  # another test's look at all loop devices may hold that of the copy
    open_source(str(copy)).close()


def test_a_pool_whose_making_was_cut_short_starts_again(pool: Path) -> None:
    with pool.open("r+b") as file:
        file.seek(IN_PROGRESS)
        file.write(b"\x01")
    with pytest.raises(SourceDamaged, match="`kvfs mkfs --force` starts again"):
        open_source(str(pool))


def test_so_does_one_without_a_pool_in_its_file_system(tmp_path: Path) -> None:
    with loop_device(IMAGE_BYTES, format_xfs=True) as device:
        subprocess.run(["xfs_admin", "-L", "kvfs", device], check=True, capture_output=True)
        with mounted_at(tmp_path / "look", device):
            pass
        with pytest.raises(SourceForeign, match="kvfs mkfs --force starts again"):
            open_source(device)
