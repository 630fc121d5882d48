"""Extents: one preallocated file per inode, named by its number, and the identities beside them.

An extent is created for one inode and unlinked with it; it never serves a second one. This module
deals with files, disk blocks and xattrs, not with names or the index. All methods may run in
threads. ENOSPC and EDQUOT are raised as NoSpace, other failures as OSError.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from itertools import chain
from typing import Final

from kvfs.core.drives import ByDrive, Numbering
from kvfs.core.errors import SPACE_ERRORS, Damaged
from kvfs.core.pool_layout import EXTENTS, FAN_OUT, IDENTITIES, file_name
from kvfs.core.records import AttributeRecord, Identity
from kvfs.core.types import (
    SIZE_MAX_BYTES,
    STAT_BLOCK_BYTES,
    TARGET_MAX_BYTES,
    DriveNo,
    InodeNo,
    Sequence,
    round_up,
)
from kvfs.storage.extent_bytes import Range, lacks_bytes, missing, unwritten
from kvfs.storage.extent_moves import ExtentMoves
from kvfs.storage.fan_out import FanOut
from kvfs.storage.file_leases import ignore_breaks, may_be_written, refuses_lease
from kvfs.storage.file_xattrs import XATTR_FIXED, FileXattrs
from kvfs.storage.memory_files import ExtentPlaces, MemoryFiles
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, Syscalls

#: Errors of XFS and ext4 for a file whose inode or attributes are broken. Not EIO, which may be the
#: device.
BROKEN_FILE: Final = frozenset({errno.EUCLEAN, errno.EBADMSG})
_FILE_FLAGS: Final = os.O_CLOEXEC | os.O_NOATIME | os.O_NOFOLLOW
#: Most holes to search for in a reserve, some 2 us each.
_HOLES_MAX: Final = 256


class Extents:
    """The extent files and identity files of one pool: those of an inode are on its drive."""

    def __init__(
        self,
        pool_fds: tuple[int, ...],
        syscalls: Syscalls,
        fs_type: str,
        memory: MemoryFiles | None = None,
    ) -> None:
        """*pool_fds* are the directories of the pool's drives, by number, all on *fs_type*.

        *memory*: those that are in memory, and closed with the others.
        """
        self._syscalls = syscalls
        self._fs_type = fs_type
        ignore_breaks()
        #: The drives that have failed: what is asked for there is Damaged from now on.
        self.lost: Final[set[DriveNo]] = set()
        drives = ByDrive([FanOut(fd, EXTENTS, syscalls) for fd in pool_fds], self.lost)
        #: What is in memory, and what moves it to the drives.
        self.memory: Final = memory
        self.moves: Final = ExtentMoves(drives, syscalls)
        self._extents = drives if memory is None else ExtentPlaces(drives, memory)
        self._nodes = ByDrive([FanOut(fd, IDENTITIES, syscalls) for fd in pool_fds], self.lost)
        #: How many drives the pool lies on; and the serial of an inode: the older has the lower.
        self.drives, self.serial = len(pool_fds), Numbering(len(pool_fds)).serial
        self._xattrs = FileXattrs(syscalls)
        #: After a kill, the dead mount's FUSE connection may hold extents with lower serials: all
        #: that were registered for passthrough, as long as one of its clients has any file open.
        self.held_below = InodeNo(0)
        #: Whether the file of an inode that was never created could not be removed.
        self.left_behind = False

    def close(self) -> None:
        """Close the directories. Extents returned as fds stay open."""
        for files in self._fan_outs():
            files.close()
        if self.memory is not None:
            self.memory.close()

    def open_directories(self) -> None:
        """Open all directories that exist, so that no request has to wait for one to be opened."""
        for files in self._fan_outs():
            files.open_all()

    def _fan_outs(self) -> Iterator[FanOut]:
        return chain(self._extents.all, self._nodes.all)

    def directory(self, ino: InodeNo, *, of_node: bool) -> int:
        """Return the fd of the directory with *ino*'s extent or identity file. Raises OSError."""
        return (self._nodes if of_node else self._extents).of(ino).directory(ino)

    # ---- extents ----

    def create(self, ino: InodeNo, reserve_bytes: int) -> int:
        """Create *ino*'s extent, of length 0 with *reserve_bytes* allocated; return an O_RDWR fd.

        Raises NoSpace, and Damaged if the number was used before.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
        with SPACE_ERRORS:
            directory_fd = self._extents.of(ino).directory(ino, make=True)
            try:
                fd = self._syscalls.open(file_name(ino), flags, 0o600, dir_fd=directory_fd)
            except FileExistsError as error:
                raise Damaged(f"extent {ino:#x} exists before its inode") from error
            if reserve_bytes > 0:
                try:
                    self.reserve(fd, reserve_bytes)
                except BaseException:
                    self._syscalls.close(fd)
                    try:
                        self.unlink(ino)
                    except OSError:
                        self.left_behind = True
                    raise
        return fd

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Allocate the first *size_bytes* without changing the length. Raises NoSpace."""
        with SPACE_ERRORS:
            self._syscalls.fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, size_bytes)

    def reserve_rest(self, fd: int, size_bytes: int) -> None:
        """Do what ``reserve`` does, if some of it may be allocated already. Raises NoSpace."""
        with SPACE_ERRORS:
            self.allocate(fd, FALLOC_FL_KEEP_SIZE, 0, size_bytes)

    def allocate(self, fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
        """Call fallocate(2) for a range of which some may be allocated already. Raises OSError.

        XFS reserves the whole range again before it looks at what is allocated. In a full pool that
        fails, and so do other calls meanwhile. So only missing ranges are asked for.
        """
        keep_size = mode & FALLOC_FL_KEEP_SIZE
        if self._fs_type != "xfs" or mode != keep_size:
            self._syscalls.fallocate(fd, mode, offset_bytes, length_bytes)
            return
        end_bytes = offset_bytes + length_bytes
        for gap in missing(self._syscalls, fd, offset_bytes, end_bytes):
            self._syscalls.fallocate(fd, FALLOC_FL_KEEP_SIZE, gap.start_bytes, gap.size_bytes)
        if not keep_size and self._syscalls.fstat(fd).st_size < end_bytes:
            # Extends by the last byte: ftruncate would cut off what is written meanwhile.
            self._syscalls.fallocate(fd, mode, end_bytes - 1, 1)

    def reserve_write(self, fd: int, offset_bytes: int, size_bytes: int) -> None:
        """Allocate what a write beyond the end will fill. Raises OSError.

        Without it XFS preallocates as much again as the file has, for which no space was made.
        """
        if self._fs_type == "xfs":
            self.allocate(fd, FALLOC_FL_KEEP_SIZE, offset_bytes, size_bytes)

    def open(self, ino: InodeNo, flags: int) -> int:
        """Open *ino*'s extent with *flags* (access mode, O_DIRECT).

        Raises Damaged if it is missing or broken.
        """
        files = self._extents.of(ino)
        try:
            directory_fd = files.directory(ino)
            return self._syscalls.open(file_name(ino), flags | _FILE_FLAGS, dir_fd=directory_fd)
        except OSError as error:
            if self._extents.of(ino) is not files:  # it has left memory meanwhile
                return self.open(ino, flags)
            _raise_damaged(ino, error)
            raise

    def open_cached(self, ino: InodeNo, flags: int) -> int:
        """Do what ``open`` does without waiting for the device; -1 if that is not possible."""
        directory_fd = self._extents.of(ino).opened(ino)
        if directory_fd < 0:
            return -1
        try:
            return self._syscalls.open_cached(
                file_name(ino), flags | _FILE_FLAGS, dir_fd=directory_fd
            )
        except OSError as error:
            _raise_damaged(ino, error)
            raise

    def reopen(self, fd: int, flags: int) -> int:
        """Open the extent behind *fd* with *flags*; it never waits. Raises OSError."""
        return self._syscalls.reopen(fd, flags | _FILE_FLAGS)

    def trim(self, fd: int, size_bytes: int) -> int:
        """Free the blocks beyond *size_bytes*, the file's size; return the bytes still allocated.

        Punching a hole past EOF takes 25 us on a dirty extent of XFS, where ftruncate writes the
        file back first (9 ms). ext4 ignores holes past EOF; ftruncate to the same size works there.
        """
        if self._fs_type == "ext4":
            self._syscalls.ftruncate(fd, size_bytes)
        else:
            # To MAX_LFS_FILESIZE (linux/fs.h), the s_maxbytes of XFS and tmpfs.
            start_bytes = round_up(size_bytes)
            if start_bytes < SIZE_MAX_BYTES:
                mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
                self._syscalls.fallocate(fd, mode, start_bytes, SIZE_MAX_BYTES - start_bytes)
        return self.allocated_bytes(fd)

    def trim_holes(self, fd: int, size_bytes: int) -> int:
        """Free blocks that were reserved and not written, up to *size_bytes*, the file's size.

        Nobody may write meanwhile, through a mapping either (``in_use``). If there are many holes,
        only the first ones are freed, since the reserve is at the start. Returns the bytes that are
        still allocated. Raises OSError.
        """
        looks = 0
        for run in unwritten(self._syscalls, fd, round_up(size_bytes)):
            at_bytes = run.start_bytes
            while at_bytes < run.end_bytes and looks < _HOLES_MAX:
                looks += 1
                data_bytes = self._seek(fd, at_bytes, os.SEEK_DATA, run.end_bytes)
                hole = Range(round_up(at_bytes), min(data_bytes, run.end_bytes))
                if hole.size_bytes > 0:
                    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
                    self._syscalls.fallocate(fd, mode, hole.start_bytes, hole.size_bytes)
                if data_bytes >= run.end_bytes:
                    break
                at_bytes = self._seek(fd, data_bytes, os.SEEK_HOLE, run.end_bytes)
        return self.allocated_bytes(fd)

    def _seek(self, fd: int, at_bytes: int, whence: int, end_bytes: int) -> int:
        """Return the offset of the next data or hole, *end_bytes* if there is none."""
        try:
            return self._syscalls.lseek(fd, at_bytes, whence)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return end_bytes

    def empty(self, fd: int) -> int:
        """Free the blocks of an extent that is still being written; return the bytes left.

        The length stays, so that mappings can still be read; they read zeros.
        """
        size_bytes = max(1, self._syscalls.fstat(fd).st_size)
        self._syscalls.fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size_bytes)
        return self.trim(fd, size_bytes) if self._fs_type != "ext4" else self.allocated_bytes(fd)

    def allocated_bytes(self, fd: int) -> int:
        """Return the bytes that the extent behind *fd* holds on the device (st_blocks)."""
        return self._syscalls.fstat(fd).st_blocks * STAT_BLOCK_BYTES

    def in_use(self, fd: int) -> bool:
        """Whether anything but *fd*, which may read or write, has the extent open or mapped.

        The kernel then refuses a write lease (file_leases.py).
        """
        return refuses_lease(self._syscalls, fd, fcntl.F_WRLCK)

    def is_used(self, ino: InodeNo) -> bool:
        """Whether another process has *ino*'s extent, which is closed here, open or mapped.

        False if leases do not work here, and for a missing extent.
        """
        return self._is_held(ino, os.O_RDWR, fcntl.F_WRLCK)

    def is_written(self, ino: InodeNo) -> bool:
        """Whether a client of a dead mount can write *ino*'s extent, which is closed here.

        The kernel then refuses a read lease. False in the same cases as ``is_used``.
        """
        return self._is_held(ino, os.O_RDONLY, fcntl.F_RDLCK)

    def _is_held(self, ino: InodeNo, flags: int, lease: int) -> bool:
        try:
            fd = self.open(ino, flags)
        except (Damaged, OSError):
            return False
        try:
            return refuses_lease(self._syscalls, fd, lease)
        except OSError:
            return False  # no leases here, so a closed extent counts as unused
        finally:
            self._syscalls.close(fd)

    def stat(self, ino: InodeNo) -> os.stat_result | None:
        """Return the stat of *ino*'s extent, None if there is none."""
        try:
            directory_fd = self._extents.of(ino).directory(ino)
            return self._syscalls.stat(file_name(ino), dir_fd=directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def unlink(self, ino: InodeNo) -> None:
        """Remove *ino*'s extent; a missing one is fine. Open fds keep bytes and blocks.

        An extent that only a dead mount's connection holds is emptied first.
        """
        if self.serial(ino) < self.held_below:
            with contextlib.suppress(Damaged, OSError):
                self._give_back(ino)
        self._unlink(self._extents.of(ino), ino)
        if self.memory is not None:
            self.memory.forget(ino)

    def _give_back(self, ino: InodeNo) -> None:
        fd = self.open(ino, os.O_RDWR)
        try:
            if not self.in_use(fd):
                self._syscalls.ftruncate(fd, 0)
        finally:
            self._syscalls.close(fd)

    def identify(self, ino: InodeNo, identity: Identity, *, fd: int | None = None) -> bool:
        """Write *identity* onto *ino*'s extent (two setxattr); False if the extent is gone.

        *fd*, if the extent is open anyway, halves the cost: 10 us instead of 18. Raises NoSpace.
        """
        with SPACE_ERRORS:
            try:
                self._xattrs.set_identity(
                    self._extents.of(ino).path(ino) if fd is None else fd, identity
                )
            except FileNotFoundError:
                return False
        return True

    def unidentify(self, ino: InodeNo) -> bool:
        """Remove *ino*'s identity; False if it had none."""
        try:
            self._syscalls.removexattr(self._extents.of(ino).path(ino), XATTR_FIXED)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOENT):
                raise
            return False
        return True

    def may_be_written(self, fd: int) -> bool:
        """Whether somebody has the extent behind *fd*, which is O_RDONLY, open or mapped to write.

        True if leases do not work here.
        """
        return may_be_written(self._syscalls, fd)

    def has_holes(self, ino: InodeNo) -> bool:
        """Whether a part of *ino*'s extent was never written. Raises Damaged, OSError."""
        fd = self.open(ino, os.O_RDONLY)
        try:
            return lacks_bytes(self._syscalls, fd, self._syscalls.fstat(fd).st_size)
        finally:
            self._syscalls.close(fd)

    def identity(self, ino: InodeNo) -> Identity | None:
        """Return the identity of *ino*'s extent, None if it has none. Raises Damaged."""
        try:
            path = self._extents.of(ino).path(ino)
        except FileNotFoundError:
            return None
        return self._xattrs.identity(path, ino)

    def scan(self, directories: int = FAN_OUT) -> Iterator[InodeNo]:
        """Yield the inode number of every extent in the first *directories* of each fan-out."""
        drives = enumerate(self._extents.all)
        there = [files for drive, files in drives if drive not in self.lost]
        return chain.from_iterable(files.scan(directories) for files in there)

    # ---- identity files of directories and symlinks ----

    def identify_node(self, ino: InodeNo, identity: Identity, target: bytes = b"") -> None:
        """Write the identity file of a directory, or of a symlink to *target*. Raises NoSpace.

        Called again for a new name or parent. A symlink's target never changes, so writing the
        same bytes again is harmless.
        """
        with SPACE_ERRORS:
            directory_fd = self._nodes.of(ino).directory(ino, make=True)
            flags = os.O_WRONLY | os.O_CREAT | _FILE_FLAGS
            fd = self._syscalls.open(file_name(ino), flags, 0o600, dir_fd=directory_fd)
            try:
                if stat.S_ISLNK(identity.mode):
                    self._syscalls.pwrite(fd, target, 0)
                    self._syscalls.ftruncate(fd, len(target))
                self._xattrs.set_identity(fd, identity, target)
            finally:
                self._syscalls.close(fd)

    def node(self, ino: InodeNo) -> tuple[Identity, bytes] | None:
        """Return the identity in *ino*'s identity file, and a symlink's target; None without one.

        Raises Damaged if one of them is not what was written, or if they do not match.
        """
        try:
            directory_fd = self._nodes.of(ino).directory(ino)
            fd = self._syscalls.open(file_name(ino), _FILE_FLAGS, dir_fd=directory_fd)
        except FileNotFoundError:
            return None
        try:
            target = self._syscalls.pread(fd, TARGET_MAX_BYTES + 1, 0)
            identity = self._xattrs.identity(fd, ino, target)
        finally:
            self._syscalls.close(fd)
        return None if identity is None else (identity, target)

    def forget_node(self, ino: InodeNo) -> None:
        """Remove *ino*'s identity file; a missing one is fine."""
        self._unlink(self._nodes.of(ino), ino)

    def scan_nodes(self) -> Iterator[InodeNo]:
        """Yield the inode number of every identity file."""
        return chain.from_iterable(files.scan() for files in self._nodes.all)

    # ---- both kinds ----

    def write_attributes(self, record: AttributeRecord, *, of_node: bool) -> None:
        """Write *record* into the identity file (*of_node*) or extent of its inode.

        Call it before the identity with that or a higher sequence number is written. A missing
        extent is fine. Raises NoSpace, OSError.
        """
        with SPACE_ERRORS, contextlib.suppress(FileNotFoundError):
            if not of_node:
                self._xattrs.set_attributes(self._extents.of(record.ino).path(record.ino), record)
                return
            directory_fd = self._nodes.of(record.ino).directory(record.ino, make=True)
            flags = os.O_WRONLY | os.O_CREAT | _FILE_FLAGS
            fd = self._syscalls.open(file_name(record.ino), flags, 0o600, dir_fd=directory_fd)
            try:
                self._xattrs.set_attributes(fd, record)
            finally:
                self._syscalls.close(fd)

    def attributes(self, ino: InodeNo, upto: Sequence, *, of_node: bool) -> AttributeRecord | None:
        """Return the attributes that *ino*'s file had with an identity of sequence *upto*.

        None if it never had any, or if they are damaged. Raises OSError.
        """
        files = self._nodes if of_node else self._extents
        try:
            return self._xattrs.attributes(files.of(ino).path(ino), ino, upto)
        except FileNotFoundError:
            return None

    def make_durable(self, ino: InodeNo) -> None:
        """Make *ino*'s identity and bytes durable; it blocks. Raises OSError."""
        for files in (self._extents, self._nodes):
            try:
                directory_fd = files.of(ino).directory(ino)
                fd = self._syscalls.open(file_name(ino), _FILE_FLAGS, dir_fd=directory_fd)
            except FileNotFoundError:
                continue
            try:
                self._syscalls.fsync(fd)
            finally:
                self._syscalls.close(fd)

    def _unlink(self, files: FanOut, ino: InodeNo) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._syscalls.unlink(file_name(ino), dir_fd=files.directory(ino))


def _raise_damaged(ino: InodeNo, error: OSError) -> None:
    """Raise Damaged if *error*, of an open, says that *ino*'s extent is missing or broken."""
    if isinstance(error, FileNotFoundError):
        raise Damaged(f"extent {ino:#x} is missing") from error
    if error.errno in BROKEN_FILE:
        raise Damaged(f"extent {ino:#x} is broken: {error.strerror}") from error
