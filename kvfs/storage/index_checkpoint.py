"""CHECKPOINT: the last commit of the index that is durable, to which a start can go back.

LMDB never writes to a page that a read transaction may see (mdb_find_oldest in lib/mdb.c). So a
server holds a reader on a commit, makes data.mdb durable, and keeps the commit's meta page here.
After a power loss other pages of data.mdb may be of any age, but those of the commit are whole.

The rule: a writer of the index holds the commit in CHECKPOINT, or has removed that file.
"""

import contextlib
import os
import struct
from typing import Final, NamedTuple, Self

import lmdb

from kvfs.core.checksum import CRC, CRC32C_RESIDUE, crc32c
from kvfs.core.errors import IndexDamaged
from kvfs.core.pool_layout import CHECKPOINT, CHECKPOINT_NEW, DATA_NAME, INDEX
from kvfs.core.types import InodeNo
from kvfs.storage.lmdb_file import META_BYTES, check_data_file, read_meta, write_metas
from kvfs.storage.replaced_file import replaced_file
from kvfs.storage.syscalls import Syscalls

_MAGIC: Final = b"KVFSCKPT"
_VERSION: Final = 1
#: magic, version, number of pending inodes, data.mdb's inode, transaction, first young inode.
_HEAD: Final = struct.Struct("<8sIIQQQ")
assert _HEAD.size == 40
_INO_BYTES: Final = 8
_CRC_BYTES: Final = 4
#: A file with more pending inodes is not believed.
_PENDING_MAX: Final = 1 << 22


class Checkpoint(NamedTuple):
    """One durable commit, and the inodes whose state it may not have.

    ``data_ino`` is the inode number of data.mdb on its file system: the commit is in no other file.
    Inodes from ``young`` on were created later. ``pending`` were unfinished: drafts, blocks being
    rewritten, and extents without an inode.
    """

    data_ino: int
    transaction: int
    young: InodeNo
    pending: tuple[InodeNo, ...]
    meta: bytes

    def pack(self) -> bytes:
        """Return the content of CHECKPOINT."""
        head = _HEAD.pack(
            _MAGIC, _VERSION, len(self.pending), self.data_ino, self.transaction, self.young
        )
        body = head + self.meta + struct.pack(f"<{len(self.pending)}Q", *self.pending)
        return body + CRC.pack(crc32c(body))

    @classmethod
    def parse(cls, raw: bytes) -> Self | None:
        """Return the checkpoint in *raw*, None if it is not whole or of another version."""
        least_bytes = _HEAD.size + META_BYTES + _CRC_BYTES
        if len(raw) < least_bytes or crc32c(raw) != CRC32C_RESIDUE:
            return None
        magic, version, count, data_ino, transaction, young = _HEAD.unpack_from(raw)
        if (magic, version) != (_MAGIC, _VERSION):
            return None
        if len(raw) != least_bytes + count * _INO_BYTES:
            return None
        pending = struct.unpack_from(f"<{count}Q", raw, _HEAD.size + META_BYTES)
        meta = raw[_HEAD.size : _HEAD.size + META_BYTES]
        return cls(data_ino, transaction, InodeNo(young), tuple(map(InodeNo, pending)), meta)


def read_checkpoint(pool_fd: int, syscalls: Syscalls) -> Checkpoint | None:
    """Return the checkpoint in CHECKPOINT; None if there is no valid one. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = syscalls.open(CHECKPOINT, flags, dir_fd=pool_fd)
    except FileNotFoundError:
        return None
    try:
        most_bytes = _HEAD.size + META_BYTES + _CRC_BYTES + _PENDING_MAX * _INO_BYTES
        size_bytes = syscalls.fstat(fd).st_size
        raw = b"" if size_bytes > most_bytes else syscalls.pread(fd, size_bytes + 1, 0)
    finally:
        syscalls.close(fd)
    return Checkpoint.parse(raw)


def write_checkpoint(pool_fd: int, syscalls: Syscalls, checkpoint: Checkpoint) -> None:
    """Replace CHECKPOINT; durable on return. Raises OSError."""
    raw = checkpoint.pack()
    with replaced_file(pool_fd, syscalls, CHECKPOINT, CHECKPOINT_NEW, durable=True) as fd:
        written_bytes = 0
        while written_bytes < len(raw):
            written_bytes += syscalls.write(fd, raw[written_bytes:])
    syscalls.fsync(pool_fd)


def remove_checkpoint(pool_fd: int, syscalls: Syscalls) -> None:
    """Remove CHECKPOINT durably: from now on its commit may be overwritten. Raises OSError."""
    try:
        syscalls.unlink(CHECKPOINT, dir_fd=pool_fd)
    except FileNotFoundError:
        return
    syscalls.fsync(pool_fd)


def go_back(pool_fd: int, syscalls: Syscalls, checkpoint: Checkpoint, index_path: str) -> None:
    """Make the commit of *checkpoint* the index's last one. Nobody may have the index open.

    Raises IndexDamaged if it is of another data.mdb, or if the file is too short; OSError.
    """
    path = f"{INDEX}/{DATA_NAME}"
    try:
        data_fd = syscalls.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=pool_fd)
    except FileNotFoundError:
        raise IndexDamaged(f"index: {DATA_NAME} is missing") from None
    try:
        if syscalls.fstat(data_fd).st_ino != checkpoint.data_ino:
            raise IndexDamaged(f"{CHECKPOINT}: of another {DATA_NAME}")
        write_metas(data_fd, checkpoint.meta, syscalls)
    finally:
        syscalls.close(data_fd)
    check_data_file(index_path)


class HeldCommit:
    """A commit whose pages LMDB does not overwrite before ``end``."""

    def __init__(self, env: lmdb.Environment, index_path: str, syscalls: Syscalls) -> None:
        """Hold the last commit of *env*; the caller commits nothing meanwhile.

        Raises IndexDamaged, OSError.
        """
        self._syscalls = syscalls
        flags = os.O_RDWR | os.O_CLOEXEC
        with contextlib.ExitStack() as parts:
            #: Opened before anything is synced, so that its sync reports every write-back failure.
            self._fd = syscalls.open(f"{index_path}/{DATA_NAME}", flags)
            parts.callback(syscalls.close, self._fd)
            txn = env.begin()
            parts.callback(txn.abort)
            self.transaction: int = txn.id()
            self.meta = read_meta(self._fd, self.transaction)
            self.data_ino = syscalls.fstat(self._fd).st_ino
            self._parts = parts.pop_all()

    def make_durable(self) -> None:
        """Write all pages to the device; takes from milliseconds to seconds. Raises OSError."""
        self._syscalls.fdatasync(self._fd)

    def end(self) -> None:
        """Let LMDB use its pages again. Idempotent."""
        self._parts.close()


def is_usable(checkpoint: Checkpoint | None, held: HeldCommit) -> bool:
    """Whether *checkpoint* names the commit *held*, and thus stays usable while that is held."""
    return checkpoint is not None and (
        (checkpoint.data_ino, checkpoint.transaction) == (held.data_ino, held.transaction)
    )
