"""How creating, removing and moving an inode changes records and counters. Pure."""

import stat

from kvfs.core.errors import IsADirectory, NotADirectory, NotEmpty
from kvfs.core.lifecycle import State
from kvfs.core.records import Counters
from kvfs.core.types import InodeNo, InodeRecord, Sequence


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


def refuse_mismatch(record: InodeRecord, replaced: InodeRecord) -> None:
    """Raise unless *record* may take *replaced*'s place (rename(2))."""
    if stat.S_ISDIR(replaced.mode):
        if not stat.S_ISDIR(record.mode):
            raise IsADirectory
        if replaced.entries:
            raise NotEmpty
    elif stat.S_ISDIR(record.mode):
        raise NotADirectory
