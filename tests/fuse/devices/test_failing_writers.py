"""A drive that fails under a writer: what it has written is never seen, and its fsync says so."""

import os
import stat
from pathlib import Path

import pytest

from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, mounted_on
from tests.support.devices.failing_drive_program import BAD_PAGE, PAGE_BYTES, Fails

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

#: All of its pages lie on bad sectors.
LOST = (BAD_PAGE + bytes(b"L" * PAGE_BYTES))[:PAGE_BYTES] * 32


def forget_pages(server_pid: int) -> None:
    """Let the kernel drop the pages of all extents that the server has open."""
    for link in Path(f"/proc/{server_pid}/fd").iterdir():
        if "/extents/" in os.readlink(link) and stat.S_ISREG(os.stat(link).st_mode):
            fd = os.open(link, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def test_half_a_block_behind_a_write_that_failed_is_never_seen(drive: FailingDrive) -> None:
    """[device-write] The daemon writes into a page that the drive does not give back: EIO."""
    with mounted_on(drive, "daemon") as mounted:
        fd = os.open(mounted.path / "block", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(fd, LOST)
            drive.write_back()
            forget_pages(mounted.server_pid)
            drive.fail(reads=Fails.BAD_PAGES)
            with pytest.raises(OSError, match="Input/output error"):
                os.pwrite(fd, b"x" * 100, PAGE_BYTES + 100)
            drive.recover()
        finally:
            os.close(fd)
        assert os.listdir(mounted.path) == []
        assert not (mounted.path / "block").exists()


def test_an_fsync_tells_of_bytes_whose_loss_the_server_heard_of_before(
    drive: FailingDrive,
) -> None:
    """[fsync] A syncfs tells each error once, and the server makes one after a failed write."""
    with (
        mounted_on(drive, "daemon", "--fsync=honour") as mounted,
        (mounted.path / "draft.tmp").open("wb", buffering=0) as file,
    ):
        drive.fail(writes=Fails.BAD_PAGES)
        file.write(LOST)
        drive.write_back()
        until(lambda: mounted.status()["write_back_failures"] > 0, "the server hears of it")
        drive.recover()
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(file.fileno())
