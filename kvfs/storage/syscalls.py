"""The system calls of the tier that can fail, as one class: the seam where a test injects failures.

Nothing here knows what a block is. The methods are the functions of ``os`` themselves where those
exist: the seam costs one attribute lookup. Every method may be called from any thread.
"""

import ctypes
import errno
import fcntl
import functools
import os
from typing import Final, Protocol

#: linux/falloc.h.
FALLOC_FL_KEEP_SIZE: Final = 0x01
FALLOC_FL_PUNCH_HOLE: Final = 0x02
FALLOC_FL_ZERO_RANGE: Final = 0x10

#: linux/fs.h: start to write dirty pages; or also wait for them and for earlier writes.
SYNC_FILE_RANGE_WRITE: Final = 2
SYNC_FILE_RANGE_WRITE_AND_WAIT: Final = 7

#: The C library, opened once. It releases the GIL around each call and keeps errno per thread.
LIBC: Final = ctypes.CDLL(None, use_errno=True)
# c_int64 is off_t on every 64-bit Linux, the only one kvfs runs on.
LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
LIBC.fallocate.restype = ctypes.c_int
LIBC.syncfs.argtypes = (ctypes.c_int,)
LIBC.syncfs.restype = ctypes.c_int
LIBC.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
LIBC.sync_file_range.restype = ctypes.c_int

#: include/uapi/asm-generic/unistd.h: openat2(2), the same on all machines that have it.
_OPENAT2: Final = 437
#: include/uapi/linux/openat2.h, Linux 5.12: fail rather than wait for the device.
_RESOLVE_CACHED: Final = 0x20
#: openat2(2) refuses all other flags beside O_PATH.
_PATH_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
#: Not in the cache; or this kernel does not know the call, or the flag.
_NOT_CACHED: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.ENOSYS, errno.EINVAL, errno.EPERM})


class _OpenHow(ctypes.Structure):
    """struct open_how of linux/openat2.h."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_HOW_BYTES: Final = ctypes.sizeof(_OpenHow)
#: syscall(2) with the arguments of openat2(2); others call it with theirs.
_openat2: Final = LIBC["syscall"]
_openat2.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
)
_openat2.restype = ctypes.c_long


@functools.cache
def _cached_only(flags: int) -> "ctypes._Pointer[_OpenHow]":
    flags |= os.O_CLOEXEC
    if flags & os.O_PATH:
        flags &= _PATH_FLAGS
    return ctypes.pointer(_OpenHow(flags, 0, _RESOLVE_CACHED))


class Transaction(Protocol):
    """What ``Syscalls.commit`` needs of an LMDB transaction."""

    def commit(self) -> None:
        """Make the transaction visible; may raise."""


def raise_errno(what: str) -> None:
    """Raise the OSError of the libc call that just failed in this thread."""
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


class Syscalls:
    """The calls as the kernel answers them; errors are OSError (``commit``: lmdb.Error)."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    read = staticmethod(os.read)
    write = staticmethod(os.write)
    pread = staticmethod(os.pread)
    preadv = staticmethod(os.preadv)
    pwrite = staticmethod(os.pwrite)
    pwritev = staticmethod(os.pwritev)
    lseek = staticmethod(os.lseek)
    ftruncate = staticmethod(os.ftruncate)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)
    fstat = staticmethod(os.fstat)
    stat = staticmethod(os.stat)
    statvfs = staticmethod(os.statvfs)
    fchmod = staticmethod(os.fchmod)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    unlink = staticmethod(os.unlink)
    rename = staticmethod(os.rename)
    link = staticmethod(os.link)
    sendfile = staticmethod(os.sendfile)
    utime = staticmethod(os.utime)
    setxattr = staticmethod(os.setxattr)
    getxattr = staticmethod(os.getxattr)
    listxattr = staticmethod(os.listxattr)
    removexattr = staticmethod(os.removexattr)
    flock = staticmethod(fcntl.flock)
    # Last of its module: the name hides the module from here on.
    fcntl = staticmethod(fcntl.fcntl)
    posix_fadvise = staticmethod(os.posix_fadvise)

    def reopen(self, fd: int, flags: int) -> int:
        """Open the file behind *fd*, which keeps it in memory, with *flags* (proc_pid_fd(5))."""
        return os.open(f"/proc/self/fd/{fd}", flags & ~os.O_NOFOLLOW)

    def open_cached(self, name: str, flags: int, *, dir_fd: int) -> int:
        """Open *name* in the directory *dir_fd*; -1 if that might wait for the device.

        The kernel opens only what its cache of names has. FileNotFoundError only if the cache knows
        that there is no such file. Always -1 where the call is refused: seccomp cannot see what its
        structure asks for, so RestrictSUIDSGID of systemd.exec(5) and some containers forbid it.
        """
        fd: int = _openat2(_OPENAT2, dir_fd, os.fsencode(name), _cached_only(flags), _HOW_BYTES)
        if fd < 0:
            if ctypes.get_errno() in _NOT_CACHED:
                return -1
            raise_errno(name)
        return fd

    def listdir(self, fd: int) -> list[str]:
        """Return the names in the directory *fd*, which nobody else reads meanwhile."""
        return os.listdir(fd)

    def ioctl(self, fd: int, request: int, told: bytearray) -> None:
        """Call ioctl(2) with the structure *told*, which then holds the answer."""
        fcntl.ioctl(fd, request, told, True)

    def pwrite_all(self, fd: int, raw: bytes, offset_bytes: int) -> None:
        """Write all of *raw* at *offset_bytes*: pwrite(2) may write less."""
        view = memoryview(raw)
        while view:
            written_bytes = self.pwrite(fd, view, offset_bytes)
            offset_bytes += written_bytes
            view = view[written_bytes:]

    def fallocate(self, fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
        """Call fallocate(2) with *mode* (FALLOC_FL_*), again after a signal.

        os.posix_fallocate has no mode, and writes zeros if the file system has no fallocate.
        """
        while LIBC.fallocate(fd, mode, offset_bytes, length_bytes) != 0:
            if ctypes.get_errno() != errno.EINTR:
                raise_errno("fallocate")

    def check_alive(self, fd: int) -> None:
        """Raise OSError if the file system that *fd* lies on has shut itself down.

        Once XFS has, fstat(2) fails at once, without the device (xfs_vn_getattr in
        fs/xfs/xfs_iops.c). On Linux 6.18 statfs(2) goes on to answer.
        """
        os.fstat(fd)
        os.fstatvfs(fd)

    def syncfs(self, fd: int) -> None:
        """Write back everything of the file system that *fd* lies on (syncfs(2))."""
        if LIBC.syncfs(fd) != 0:
            raise_errno("syncfs")

    def sync_file_range(self, fd: int, flags: int) -> None:
        """Write the whole file *fd* to the device (sync_file_range(2)), without its size and log.

        With SYNC_FILE_RANGE_WRITE_AND_WAIT it raises the error of a write that failed before, if
        that was not reported yet (errseq; Documentation/core-api/errseq.rst).
        """
        if LIBC.sync_file_range(fd, 0, 0, flags) != 0:
            raise_errno("sync_file_range")

    def commit(self, txn: Transaction) -> None:
        """Commit an LMDB write transaction."""
        txn.commit()
