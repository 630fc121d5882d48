"""What a file on the device says of its inode: the record and the attributes that it claims.

Used by rebuild, the comparison after a power loss, and fsck. What is not whole claims nothing. A
file lacks some fields: which process has a block's lease, when it was read, what a directory holds.
``is_identified_as`` asks only whether the device has the identity that a record should have. While
requests are served, threads read what the loop compares (``ClaimsAtHand``). ``young_inodes`` finds
the files that an index of an earlier moment does not know.
"""

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvfs.core.errors import Damaged, NotAtHand
from kvfs.core.inode_rules import identity_of
from kvfs.core.lifecycle import FINAL, SLABS, State, carries_identity
from kvfs.core.records import HAS_HOLES, IS_SLAB, OF_BYTES, AttributeRecord, Identity
from kvfs.core.types import ROOT_INODE, STAT_BLOCK_BYTES, InodeNo, InodeRecord, round_up
from kvfs.engine.recovery.finish_drafts import OPEN_STATES
from kvfs.pool.pool import Pool
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import RANGE_NUMBERS
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Errors that concern one file, and not the state of the machine.
_FILE_FAILS: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.ENODATA, errno.EBADMSG})
#: What was read is kept for so many blocks until they are compared.
_KEPT_MAX: Final = 1024
#: Directories of extents that are listed to see how far the numbers go.
_DIRECTORIES_SEEN: Final = 4
#: So many numbers are asked for at most; where more may be in use, all extents are listed.
_ASKED_MOST: Final = 1 << 22
#: If so many numbers in a row have no extent, no later one has.
_NONE_BEHIND: Final = 8192


def block_record(extents: Extents, syscalls: Syscalls, ino: InodeNo) -> InodeRecord | None:
    """Return the record of an extent that is whole, as its identity says; else None.

    Size and holes are checked in spite of the identity, because a device may lose what it
    acknowledged. Raises OSError.
    """
    try:
        identity = extents.identity(ino)
        if identity is None or not stat.S_ISREG(identity.mode) or not identity.name:
            return None
        fd = extents.open(ino, os.O_RDWR)
        try:
            status = syscalls.fstat(fd)
            size_bytes = status.st_size
            if size_bytes != identity.size_bytes:
                return None
            # Pages that could not be written are clean in memory, and would hide the hole.
            syscalls.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            holes_count = size_bytes and not identity.flags & HAS_HOLES
            if holes_count and syscalls.lseek(fd, 0, os.SEEK_HOLE) < size_bytes:
                return None
            allocated_bytes = status.st_blocks * STAT_BLOCK_BYTES
            if allocated_bytes > round_up(size_bytes):
                allocated_bytes = extents.trim(fd, size_bytes)
        finally:
            syscalls.close(fd)
    except Damaged:
        return None
    except OSError as error:
        _raise_unless_file_fails(error)
        return None
    return _record(identity, status.st_ctime_ns, allocated_bytes)


def node_record(extents: Extents, ino: InodeNo) -> InodeRecord | None:
    """Return the record in the identity file of a node, None without one. Raises OSError."""
    try:
        found = extents.node(ino)
    except Damaged:
        return None
    except OSError as error:
        _raise_unless_file_fails(error)
        return None
    if found is None or stat.S_ISREG(found[0].mode):
        return None
    identity, target = found
    if (ino == ROOT_INODE) != (identity.name == b""):
        return None
    return _record(identity, identity.mtime_ns, 0, target)


def attributes_of(extents: Extents, ino: InodeNo, record: InodeRecord) -> AttributeRecord | None:
    """Return the attributes in *ino*'s file that belong to *record*. Raises OSError.

    None if it never had any, or if they cannot be read.
    """
    try:
        return extents.attributes(ino, record.sequence, of_node=not stat.S_ISREG(record.mode))
    except OSError as error:
        _raise_unless_file_fails(error)
        return None


def claimed_attributes(extents: Extents, ino: InodeNo, claim: InodeRecord) -> Mapping[bytes, bytes]:
    """Return the attributes that *ino*'s file claims beside *claim*. Raises OSError."""
    found = attributes_of(extents, ino, claim)
    return {} if found is None else found.attributes


def newer_attributes(
    extents: Extents, ino: InodeNo, record: InodeRecord, claim: InodeRecord
) -> Mapping[bytes, bytes] | None:
    """Return the attributes in the file of *ino* if they are newer than *record*; else None.

    A change of attributes has a sequence number like a change of the name
    (core/records.py): *ino* has the old ones or the new ones. Raises OSError.
    """
    found = attributes_of(extents, ino, claim)
    return None if found is None or found.sequence <= record.sequence else found.attributes


def _record(
    identity: Identity, ctime_ns: int, allocated_bytes: int, target: bytes = b""
) -> InodeRecord:
    return InodeRecord(
        mode=identity.mode,
        uid=identity.uid,
        gid=identity.gid,
        state=_state_of(identity),
        size_bytes=identity.size_bytes,
        allocated_bytes=allocated_bytes,
        atime_ns=identity.mtime_ns,
        mtime_ns=identity.mtime_ns,
        ctime_ns=ctime_ns,
        btime_ns=identity.mtime_ns,
        parent=identity.parent,
        entries=0,
        subdirs=0,
        sequence=identity.sequence,
        name=identity.name,
        target=target,
    )


def _state_of(identity: Identity) -> State:
    """Return the state of a recovered inode. No maker of a slab outlived the power loss."""
    if not stat.S_ISREG(identity.mode):
        return State.NODE
    return State.ORPHAN_SLAB if identity.flags & IS_SLAB else State.PUBLISHED


def _raise_unless_file_fails(error: OSError) -> None:
    """Raise *error* unless it concerns one file, which is then a miss."""
    if error.errno not in _FILE_FAILS:
        raise error
    _log.warning("not recovered: %s", error)


def has_bytes(record: InodeRecord) -> bool:
    """Whether *record* is that of a block: a regular file."""
    return stat.S_ISREG(record.mode)


def agrees(record: InodeRecord, claim: InodeRecord) -> bool:
    """Whether a published block's *record* is what its identity says."""
    return (
        record.state not in OPEN_STATES
        and record[:3] == claim[:3]
        and _said(record) == _said(claim)
    )


def _said(record: InodeRecord) -> tuple[object, ...]:
    return (record.parent, record.name, record.size_bytes, record.mtime_ns, record.sequence)


def _is_published_since(record: InodeRecord, claim: InodeRecord) -> bool:
    """Whether *claim* is of a block that was renamed or closed since *record* was written.

    A file does not say who has a block's lease. A block of the same kind and name still belongs to
    its maker, or is a temporary one that its maker left.
    """
    if not has_bytes(record):
        return False
    if (claim.parent, claim.name) != (record.parent, record.name):
        return True
    kind = FINAL if claim.state in FINAL else SLABS
    return record.state not in kind


def updated(record: InodeRecord, claim: InodeRecord) -> InodeRecord:
    """Return *record* with what the newer *claim* says of it."""
    if _is_published_since(record, claim):
        record = record._replace(state=claim.state, maker_tgid=0, maker_birth=0)
    return record._replace(
        mode=claim.mode,
        uid=claim.uid,
        gid=claim.gid,
        size_bytes=claim.size_bytes,
        allocated_bytes=claim.allocated_bytes,
        mtime_ns=claim.mtime_ns,
        parent=claim.parent,
        name=claim.name,
        sequence=claim.sequence,
        target=claim.target,
    )


def is_identified(extents: Extents, ino: InodeNo, *, of_node: bool) -> bool:
    """Whether a file has an identity, even an unreadable one. Raises OSError."""
    try:
        return (extents.node(ino) if of_node else extents.identity(ino)) is not None
    except Damaged:
        return True


def is_identified_as(extents: Extents, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether the identity of *ino* on the device agrees with *record*. Raises OSError."""
    try:
        if record.state == State.ALIAS:
            return True
        if not carries_identity(record):  # being written; a kill may have prevented the removal
            return extents.identity(ino) is None
        if stat.S_ISREG(record.mode):
            return _is_of(extents.identity(ino), ino, record)
        node = extents.node(ino)
    except Damaged:
        return False
    return node is not None and node[1] == record.target and _is_of(node[0], ino, record)


def _is_of(identity: Identity | None, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether *identity* is that of *record*; the mtime of a directory is ignored."""
    expected = identity_of(ino, record)
    if identity is None:
        return False
    if not stat.S_ISDIR(record.mode):
        return identity._replace(flags=identity.flags & ~OF_BYTES, content_crc=0) == expected
    return identity._replace(mtime_ns=0) == expected._replace(mtime_ns=0)


def young_inodes(pool: Pool, first: InodeNo) -> Iterator[InodeNo]:
    """Yield the inodes with serial numbers from *first* on that have an extent, oldest first.

    Most numbers of a range were never used. So the search of one ends well behind the last one
    found, and goes on where the next server began: at a distance of whole ranges from the end.
    A few directories show roughly how far the numbers of this one went, since they go to all of
    them in turn.
    """
    extents, numbers = pool.extents, pool.numbers
    last = numbers.first
    if last - first > _ASKED_MOST:
        young = (ino for ino in extents.scan() if numbers.serial(ino) >= first)
        yield from sorted(young, key=numbers.serial)
        return
    seen = max(map(numbers.serial, extents.scan(_DIRECTORIES_SEEN)), default=first)
    serial, end = first, min(last, max(seen, first) + _NONE_BEHIND)
    while serial < last:
        for ino in numbers.with_serial(serial):
            if extents.stat(ino) is not None:
                yield ino
                end = min(last, max(end, serial + _NONE_BEHIND))
        serial = InodeNo(serial + 1)
        if serial >= end:
            serial = InodeNo(last - (last - serial) // RANGE_NUMBERS * RANGE_NUMBERS)
            end = min(last, serial + _NONE_BEHIND)


class ClaimsAtHand:
    """Reads what the files of the blocks of one pool say, before the loop needs it."""

    def __init__(self, extents: Extents, background: Background, syscalls: Syscalls) -> None:
        self._extents = extents
        self._background = background
        self._syscalls = syscalls
        self._claims: dict[InodeNo, InodeRecord | None] = {}
        self._reading: set[InodeNo] = set()

    def of(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino* that its file claims, None if it is not whole.

        Raises NotAtHand, OSError.
        """
        if not self._background.is_serving:
            return self._read(ino)
        if ino not in self._claims:
            fetch = functools.partial(self._fetch, ino)
            raise NotAtHand("what a file says", lambda: fetch, ino=ino)
        return self._claims.pop(ino)

    def read_ahead(self, inos: Iterator[InodeNo]) -> None:
        """Have threads read what the files of *inos* say."""
        for ino in inos:
            asks = self._background.of(ino).asks
            if ino not in self._claims and ino not in self._reading and not asks.is_crowded:
                self._reading.add(ino)
                asks.submit(
                    functools.partial(self._read, ino),
                    functools.partial(self._keep, ino),
                    failed=functools.partial(self._fail, ino),
                )

    def _read(self, ino: InodeNo) -> InodeRecord | None:
        return block_record(self._extents, self._syscalls, ino)

    def _fetch(self, ino: InodeNo) -> Callable[[], None]:
        claim = self._read(ino)
        return lambda: self._keep(ino, claim)

    def _fail(self, ino: InodeNo, error: Exception) -> None:
        _log.warning("inode %#x is not compared yet: %s", ino, error)
        self._reading.discard(ino)

    def _keep(self, ino: InodeNo, claim: InodeRecord | None) -> None:
        self._reading.discard(ino)
        if len(self._claims) >= _KEPT_MAX:
            del self._claims[next(iter(self._claims))]
        self._claims[ino] = claim
