"""The rules of inodes and of their tree: new records, counters, the way to the root. Pure.

Every change keeps the counters and each directory's counts up to date. ``TreeCount`` counts from
scratch, for a rebuilt index and for fsck.

The second name of a block, which link(2) leaves behind, is an inode of its own in the index.
``link(a, b)`` gives the block the name *b*, as a rename does. *a* becomes its *alias*: a record
without bytes, kind or identity, which has that name and belongs to the process that linked. The
``target`` of either record is the number of the other one. A name row of an alias leads to the
block, so a lookup does not notice it (docs/dev/format.md).
"""

import stat
import struct
from collections.abc import Callable, Collection
from typing import Final

from kvfs.core.drives import DriveCounts
from kvfs.core.errors import Damaged, InvalidRequest, IsADirectory, NotADirectory, NotEmpty
from kvfs.core.lifecycle import HELD, SLABS, UNFINISHED, State
from kvfs.core.records import IS_SLAB, Counters, DriveCount, Identity
from kvfs.core.types import NO_INODE, ROOT_INODE, InodeNo, InodeRecord, Sequence


def counted(counters: Counters, record: InodeRecord, step: int) -> Counters:
    """Return *counters* after an inode like *record* came (*step* 1) or went (-1)."""
    kind = stat.S_IFMT(record.mode)
    if kind == stat.S_IFREG:
        return counters._replace(
            blocks=counters.blocks + step,
            used_bytes=counters.used_bytes + step * record.allocated_bytes,
        )
    if kind == stat.S_IFDIR:
        return counters._replace(directories=counters.directories + step)
    if kind == stat.S_IFLNK:
        return counters._replace(symlinks=counters.symlinks + step)
    return counters._replace(others=counters.others + step)


def new_record(
    parent: InodeNo,
    name: bytes,
    mode: int,
    uid: int,
    gid: int,
    now_ns: int,
    parent_record: InodeRecord,
) -> InodeRecord:
    """Return the record of a new inode; a setgid directory hands its group down (inode(7)).

    Files never keep setuid or setgid: with FUSE_HANDLE_KILLPRIV_V2 nothing would clear them.
    """
    if parent_record.mode & stat.S_ISGID:
        gid = parent_record.gid
        if stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
    return blank_record(parent, name, mode, uid, gid, now_ns)


def is_narrowed(before: InodeRecord, now: InodeRecord) -> bool:
    """Whether *now* permits somebody less: bits were removed, or owner or group changed.

    The sticky bit permits less when it is set.
    """
    if (before.uid, before.gid) != (now.uid, now.gid):
        return True
    return bool((before.mode ^ stat.S_ISVTX) & ~(now.mode ^ stat.S_ISVTX))


def blank_record(
    parent: InodeNo, name: bytes, mode: int, uid: int, gid: int, now_ns: int
) -> InodeRecord:
    """Return the record of a new inode that inherits nothing, such as the root."""
    return InodeRecord(
        mode=storable_mode(mode),
        uid=uid,
        gid=gid,
        state=State.DRAFT,
        size_bytes=0,
        allocated_bytes=0,
        atime_ns=now_ns,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        btime_ns=now_ns,
        parent=parent,
        entries=0,
        subdirs=0,
        sequence=Sequence(0),
        name=name,
    )


def storable_mode(mode: int) -> int:
    """Return *mode* without the bits that kvfs never stores."""
    if stat.S_ISDIR(mode):
        return mode & ~stat.S_ISUID
    return mode & ~(stat.S_ISUID | stat.S_ISGID)


def rights_of(record: InodeRecord, uid: int, gids: Collection[int]) -> int:
    """Return the rights (4 read, 2 write, 1 search) that *uid*, in groups *gids*, has on *record*.

    By the mode alone: the rule of acl_permission_check(), fs/namei.c.
    """
    if uid == record.uid:
        return record.mode >> 6 & 0o7
    return (record.mode >> 3 if record.gid in gids else record.mode) & 0o7


def surely_may(record: InodeRecord, uid: int, right: int) -> bool:
    """Whether *uid* has *right* (4, 2 or 1) on *record*, whatever its groups are."""
    if uid in (0, record.uid):
        return uid == 0 or bool(record.mode >> 6 & right)
    return bool(record.mode >> 3 & record.mode & right)


def refuse_mismatch(record: InodeRecord, replaced: InodeRecord) -> None:
    """Raise unless *record* may take *replaced*'s place (rename(2))."""
    if stat.S_ISDIR(replaced.mode):
        if not stat.S_ISDIR(record.mode):
            raise IsADirectory
        if replaced.entries:
            raise NotEmpty
    elif stat.S_ISDIR(record.mode):
        raise NotADirectory


class TreeCount:
    """Counts inodes one by one, and finds which are reachable from the root.

    Memory grows with the directories, not with the blocks.
    """

    def __init__(self, inode: Callable[[InodeNo], InodeRecord | None], drives: int = 1) -> None:
        """*inode* reads a record (it may raise Damaged), to follow a directory's parents.

        *drives*: how many the pool lies on.
        """
        self._inode = inode
        #: What each drive holds.
        self.by_drive: Final = DriveCounts([DriveCount()] * (drives - 1))
        self._joined: dict[InodeNo, bool] = {ROOT_INODE: True}
        #: Names and subdirectories by directory; one without names is missing.
        self.names: dict[InodeNo, tuple[int, int]] = {}
        self._by_kind: dict[int, int] = {}
        self._used_bytes = 0
        self._sequence = 0

    def count(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Count *ino* and return True; return False if its parents do not lead to the root."""
        self._sequence = max(self._sequence, record.sequence)
        is_directory = stat.S_ISDIR(record.mode)
        if ino != ROOT_INODE:
            if not self.joined(record.parent):
                return False
            entries, subdirs = self.names.get(record.parent, (0, 0))
            self.names[record.parent] = (entries + 1, subdirs + is_directory)
        kind = stat.S_IFMT(record.mode)
        self._by_kind[kind] = self._by_kind.get(kind, 0) + 1
        if kind == stat.S_IFREG:
            self._used_bytes += record.allocated_bytes
            self.by_drive.count(ino, record)
        return True

    def joined(self, directory: InodeNo) -> bool:
        """Whether *directory* is a directory and its parents lead to the root."""
        way: list[InodeNo] = []
        at = directory
        while (known := self._joined.get(at)) is None:
            way.append(at)
            self._joined[at] = False  # coming here again means that the parents form a cycle
            record = self._directory(at)
            if record is None:
                known = False
                break
            at = record.parent
        for passed in way:
            self._joined[passed] = known
        return known

    def counters(self) -> Counters:
        """Return the counters of what was counted so far."""
        by_kind = dict(self._by_kind)
        return Counters(
            blocks=by_kind.pop(stat.S_IFREG, 0),
            used_bytes=self._used_bytes,
            directories=by_kind.pop(stat.S_IFDIR, 0),
            symlinks=by_kind.pop(stat.S_IFLNK, 0),
            others=sum(by_kind.values()),
            sequence=self._sequence,
        )

    def _directory(self, ino: InodeNo) -> InodeRecord | None:
        try:
            record = self._inode(ino)
        except Damaged:
            return None
        return record if record is not None and stat.S_ISDIR(record.mode) else None


class Ascent:
    """A walk from an inode up to the root, which ends even if the directories form a cycle.

    The caller calls ``goes_on`` with the current inode before each step.

    A checksum proves that a row is intact, not that the rows form a tree. In a forged index, or one
    that lost a write, a directory may be its own ancestor. A tree may have any depth, so the number
    of steps cannot be limited; but a walk up a tree never meets a directory twice.

    Cycles are found by Brent's algorithm (R. P. Brent, An improved Monte Carlo factorization
    algorithm, BIT 20, 1980): it remembers one inode, and replaces it by the current one after 1, 2,
    4, ... steps. A walk takes less than three times the steps into the cycle and once around it,
    and constant memory.
    """

    __slots__ = ("_left", "_remembered", "_steps")

    def __init__(self) -> None:
        self._remembered = NO_INODE
        self._left = self._steps = 1

    def goes_on(self, ino: InodeNo) -> bool:
        """Return whether to go on from *ino*; False if the walk is known to have passed it."""
        if ino == self._remembered:
            return False
        self._left -= 1
        if not self._left:
            self._remembered = ino
            self._steps *= 2
            self._left = self._steps
        return True


def refuse_loop(
    directory: Callable[[InodeNo], InodeRecord], ino: InodeNo, new_parent: InodeNo
) -> None:
    """Raise InvalidRequest if directory *ino* is *new_parent* or stands above it (rename(2)).

    *directory* returns the record of a directory; what it raises is passed on.
    """
    above, ascent = new_parent, Ascent()
    while above != ROOT_INODE:
        if above == ino or not ascent.goes_on(above):
            raise InvalidRequest("a directory cannot move into itself")
        above = directory(above).parent
    if ino == ROOT_INODE:
        raise InvalidRequest("the root does not move")


def identity_of(ino: InodeNo, record: InodeRecord) -> Identity:
    """Return the identity that belongs to *record*."""
    return Identity(
        ino=ino,
        parent=record.parent,
        sequence=record.sequence,
        mode=record.mode,
        uid=record.uid,
        gid=record.gid,
        size_bytes=record.size_bytes,
        mtime_ns=record.mtime_ns,
        flags=IS_SLAB if record.state in SLABS else 0,
        content_crc=0,
        name=record.name,
    )


_TARGET: Final = struct.Struct("<Q")
#: The kind of file in the mode of an alias: none (inode(7)).
_NO_KIND: Final = 0


def alias_of(record: InodeRecord) -> InodeNo:
    """Return the alias of the block with *record*; 0 if it has one name, or is no block."""
    return _number_in(record.target) if record.target and stat.S_ISREG(record.mode) else NO_INODE


def block_of(alias: InodeRecord) -> InodeNo:
    """Return the block that record *alias* is a name of; 0 if it does not say."""
    return _number_in(alias.target)


def with_alias(record: InodeRecord, alias: InodeNo) -> InodeRecord:
    """Return the record of a block, which has *alias* from now on."""
    return record._replace(target=_TARGET.pack(alias))


def without_alias(record: InodeRecord) -> InodeRecord:
    """Return the record of a block with one name."""
    return record._replace(target=b"")


def lead_to(alias: InodeRecord, block: InodeNo) -> InodeRecord:
    """Return the record *alias* as a name of *block*."""
    return alias._replace(target=_TARGET.pack(block))


def new_alias(
    block: InodeNo, record: InodeRecord, now_ns: int, sequence: Sequence, maker: tuple[int, int]
) -> InodeRecord:
    """Return the record of an alias of *block* under the name in *record*.

    *maker*: the tgid and birth of the process that linked it.
    """
    tgid, birth = maker
    blank = blank_record(record.parent, record.name, _NO_KIND, record.uid, record.gid, now_ns)
    return blank._replace(
        state=State.ALIAS,
        sequence=sequence,
        target=_TARGET.pack(block),
        maker_tgid=tgid,
        maker_birth=birth,
    )


def may_be_linked(record: InodeRecord, *, writes: bool, owns: bool) -> bool:
    """Whether a process may link the block with *record*, which it *writes* or *owns*.

    Only what a rename would publish: a draft of its own, or what it has closed under the name that
    it was created with. A published block belongs to nobody. Whoever linked it to another name
    would take the first one away, when the linker ends.
    """
    return writes if record.state in UNFINISHED else owns and record.state in HELD


def _number_in(target: bytes) -> InodeNo:
    return InodeNo(_TARGET.unpack(target)[0]) if len(target) == _TARGET.size else NO_INODE
