"""The program behind a failing drive: a FUSE file system with one file, told what to fail.

Each line of its input is a JSON object of orders; it answers each with the count of requests that
have failed. A page of a block that begins with BAD_PAGE is what bad sectors hold, so that data can
fail while log and metadata do not.
"""

import errno
import json
import os
import stat
import sys
from enum import StrEnum
from typing import Final

import pyfuse3
import trio

#: How a page begins that the drive can fail on.
BAD_PAGE: Final = b"kvfs-test: this page lies on bad sectors"
PAGE_BYTES: Final = 4096
FILE: Final = b"drive"
_INODE: Final = pyfuse3.InodeT(2)


class Fails(StrEnum):
    """Which requests of one direction are answered EIO."""

    NONE = "none"
    #: Those that touch a page which begins with BAD_PAGE.
    BAD_PAGES = "bad pages"
    ALL = "all"


class Drive(pyfuse3.Operations):  # type: ignore[misc, unused-ignore]
    """One directory, one file."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.orders = {"reads": Fails.NONE, "writes": Fails.NONE}
        self.failed = 0
        #: How long each answer takes.
        self.delay_s = 0.0
        #: Set while requests are answered.
        self.answers = trio.Event()
        self.answers.set()

    def order(self, name: str, value: str) -> None:
        """Obey an order: what fails in a direction, or with "silent" whether nothing is answered.

        What waits when the silence ends is answered then. With "delay_s" all answers take so long.
        """
        if name == "delay_s":
            self.delay_s = float(value)
        elif name != "silent":
            self.orders[name] = Fails(value)
        elif value:
            self.answers = trio.Event()
        else:
            self.answers.set()

    async def _wait(self) -> None:
        await self.answers.wait()
        if self.delay_s:
            await trio.sleep(self.delay_s)

    def _judge(self, direction: str, data: bytes) -> None:
        rule = self.orders[direction]
        pages = range(0, len(data), PAGE_BYTES)
        bad = rule is Fails.BAD_PAGES and any(data.startswith(BAD_PAGE, at) for at in pages)
        if bad or rule is Fails.ALL:
            self.failed += 1
            raise pyfuse3.FUSEError(errno.EIO)

    async def getattr(self, inode: pyfuse3.InodeT, ctx: object = None) -> pyfuse3.EntryAttributes:
        shown = pyfuse3.EntryAttributes()
        shown.st_ino = inode
        shown.st_mode = stat.S_IFREG | 0o600 if inode == _INODE else stat.S_IFDIR | 0o755
        shown.st_size = os.fstat(self._fd).st_size if inode == _INODE else 0
        return shown

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: object = None
    ) -> pyfuse3.EntryAttributes:
        if name != FILE:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_INODE)

    async def open(self, inode: pyfuse3.InodeT, flags: int, ctx: object) -> pyfuse3.FileInfo:
        # No page cache in between: each request of the loop device is judged.
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), direct_io=True)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        await self._wait()
        data = os.pread(self._fd, size, off)
        self._judge("reads", data)
        return data

    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        await self._wait()
        self._judge("writes", buf)
        return os.pwrite(self._fd, buf, off)

    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        await self._wait()
        self._judge("writes", b"")


async def _obey(drive: Drive) -> None:
    left = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as orders:
        async for some in orders:
            *lines, left = (left + some).split(b"\n")
            for line in lines:
                for name, value in json.loads(line).items():
                    drive.order(name, value)
                print(drive.failed, flush=True)


async def _main(drive: Drive) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        await _obey(drive)
        nursery.cancel_scope.cancel()


def serve(drive: Drive, mountpoint: str) -> None:
    """Serve *drive* as the one file below *mountpoint* until the standard input ends."""
    pyfuse3.init(drive, mountpoint, {"fsname=kvfs-test-drive"})
    try:
        trio.run(_main, drive)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    path, served_at = sys.argv[1:]
    serve(Drive(os.open(path, os.O_RDWR | os.O_CLOEXEC)), served_at)
