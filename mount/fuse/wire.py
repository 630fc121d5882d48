"""The few FUSE message layouts that the channel must read or write.

All numbers and layouts are those of linux/include/uapi/linux/fuse.h (protocol 7.x, little endian
hosts); nothing here talks to the kernel.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvfs.core.types import PAGE_BYTES, BackingId


class Opcode(IntEnum):
    """FUSE request codes (enum fuse_opcode)."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


#: A whole message, or what follows its header.
Message = bytes | memoryview

#: Opcodes below this have a counter each; all others are counted as 0.
OPCODES: Final = 64

#: struct fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding.
IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
IN_HEADER_BYTES: Final = 40
#: struct fuse_out_header: len, error, unique.
OUT_HEADER: Final = struct.Struct("<IiQ")
OUT_HEADER_BYTES: Final = 16
assert IN_HEADER.size == IN_HEADER_BYTES
assert OUT_HEADER.size == OUT_HEADER_BYTES

#: struct fuse_open_out: fh, open_flags, backing_id.
OPEN_OUT: Final = struct.Struct("<QIi")
#: struct fuse_entry_out: nodeid, generation, entry_valid, attr_valid, two nsec fields, attr.
ENTRY_OUT_BYTES: Final = 128
#: struct fuse_attr_out: attr_valid, attr_valid_nsec, dummy, attr.
ATTR_OUT_HEAD: Final = struct.Struct("<QII")
ENTRY_OUT_HEAD: Final = struct.Struct("<QQQQII")
#: struct fuse_attr: ino, size, blocks, atime, mtime, ctime (s), their ns, mode, nlink, uid, gid,
#: rdev, blksize, flags.
ATTR: Final = struct.Struct("<QQQqqqIIIIIIIIII")
assert ATTR.size == 88
assert ENTRY_OUT_HEAD.size + ATTR.size == ENTRY_OUT_BYTES

#: struct fuse_statx_out: attr_valid, attr_valid_nsec, flags, spare; then struct fuse_statx: mask,
#: blksize, attributes, nlink, uid, gid, mode, ino, size, blocks, attributes_mask, four times (s,
#: ns: atime, btime, ctime, mtime), devices and spare.
STATX_OUT: Final = struct.Struct("<QII16xIIQIIIH2xQQQQqI4xqI4xqI4xqI4x16x112x")
assert STATX_OUT.size == 288
#: Of linux/stat.h: what stat(2) tells, and the birth time.
STATX_BASIC_AND_BTIME: Final = 0x7FF | 0x800
#: struct fuse_kstatfs: blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding, spare.
STATFS_OUT: Final = struct.Struct("<QQQQQIII28x")
#: Of struct fuse_setattr_in valid, with what follows up to the times; and atime, mtime, ctime in
#: seconds, then their nanoseconds.
SETATTR_IN_VALID: Final = struct.Struct("<I28x")
SETATTR_IN_TIMES: Final = struct.Struct("<QQQIII")
SETATTR_IN_BYTES: Final = 88
#: struct fuse_open_in: flags, open_flags.
OPEN_IN: Final = struct.Struct("<II")
#: struct fuse_release_in: fh, flags, release_flags, lock_owner.
RELEASE_IN: Final = struct.Struct("<QIIQ")
#: struct fuse_read_in: fh, offset, size, read_flags, lock_owner, flags, padding.
READ_IN: Final = struct.Struct("<QQIIQII")
#: struct fuse_write_in: fh, offset, size, write_flags, lock_owner, flags, padding; the data follow.
WRITE_IN: Final = struct.Struct("<QQIIQII")
#: struct fuse_write_out: size, padding.
WRITE_OUT: Final = struct.Struct("<II")
#: struct fuse_flush_in: fh, unused, padding, lock_owner.
FLUSH_IN: Final = struct.Struct("<QIIQ")
#: struct fuse_fallocate_in: fh, offset, length, mode, padding.
FALLOCATE_IN: Final = struct.Struct("<QQQII")
#: struct fuse_lseek_in: fh, offset, whence, padding.
LSEEK_IN: Final = struct.Struct("<QQII")
LSEEK_OUT: Final = struct.Struct("<Q")
#: struct fuse_getxattr_in: size, padding; the name follows.
GETXATTR_IN: Final = struct.Struct("<II")

#: Offsets in struct fuse_init_out, counted from the end of the out header.
INIT_FLAGS_OFFSET: Final = 12
INIT_MAX_BACKGROUND_OFFSET: Final = 16
INIT_FLAGS2_OFFSET: Final = 32
INIT_MAX_STACK_DEPTH_OFFSET: Final = 36
INIT_REQUEST_TIMEOUT_OFFSET: Final = 40
INIT_OUT_BYTES: Final = 64
#: struct fuse_init_in: major, minor, max_readahead, flags, flags2.
INIT_IN: Final = struct.Struct("<IIIII")

FUSE_PARALLEL_DIROPS: Final = 1 << 18
FUSE_HANDLE_KILLPRIV_V2: Final = 1 << 28
FUSE_INIT_EXT: Final = 1 << 30
FUSE_DIRECT_IO_ALLOW_MMAP: Final = 1 << 36
FUSE_PASSTHROUGH: Final = 1 << 37
FUSE_HAS_RESEND: Final = 1 << 39
FUSE_ALLOW_IDMAP: Final = 1 << 40
FUSE_REQUEST_TIMEOUT: Final = 1 << 42

FOPEN_DIRECT_IO: Final = 1 << 0
FOPEN_KEEP_CACHE: Final = 1 << 1
FOPEN_NOFLUSH: Final = 1 << 5
FOPEN_PASSTHROUGH: Final = 1 << 7

#: Of enum fuse_notify_code.
NOTIFY_INVAL_INODE: Final = 2
NOTIFY_INVAL_ENTRY: Final = 3
#: Since Linux 6.9.
NOTIFY_RESEND: Final = 7
#: Since Linux 6.16.
NOTIFY_INC_EPOCH: Final = 8

#: The most that one READ, READDIR or WRITE moves: max_pages and max_write of libfuse 3, 1 MiB.
TRANSFER_MAX_BYTES: Final = 1 << 20
#: Read buffer: the data of a WRITE, the request's own fields and a page, as the kernel demands.
REQUEST_MAX_BYTES: Final = TRANSFER_MAX_BYTES + 2 * PAGE_BYTES
#: Requests the kernel expects no answer to.
UNANSWERED: Final = frozenset(
    {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.NOTIFY_REPLY}
)


class Grant(NamedTuple):
    """How the kernel reaches the bytes of an open file: FOPEN_* flags, and a backing id or 0."""

    open_flags: int
    backing_id: BackingId


def error_reply(unique: int, errno_code: int) -> bytes:
    """Return a whole reply that fails request *unique* with *errno_code* (positive, 0 succeeds)."""
    return OUT_HEADER.pack(OUT_HEADER_BYTES, -errno_code, unique)


def data_reply(unique: int, payload: bytes) -> bytes:
    """Return a whole successful reply that carries *payload*."""
    return OUT_HEADER.pack(OUT_HEADER_BYTES + len(payload), 0, unique) + payload
