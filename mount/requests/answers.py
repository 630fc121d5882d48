"""The decision about each request: which inode, how many links, how long the kernel may keep it.

How an answer is encoded is decided elsewhere: ``fast`` writes bytes, ``replies`` makes objects for
pyfuse3.
"""

import functools
import os
import secrets
import stat
from collections.abc import Callable
from hashlib import blake2b
from stat import S_ISDIR
from typing import Final, NamedTuple

from kvfs.core.errors import DeadInode, Exists, InvalidRequest, NoSpace, NotFound
from kvfs.core.inode_rules import alias_of
from kvfs.core.lifecycle import HIDEABLE, UNFINISHED
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, SECOND_NS, HandleNo, InodeNo, InodeRecord
from kvfs.engine.store import Store
from kvfs.machine.processes import SERVER
from mount.files.callers import credentials_of, may_empty
from mount.files.files import Files
from mount.fuse.channel import Requester
from mount.fuse.wire import ATTR_OUT_HEAD, Grant
from mount.requests.handle_lookups import NAMES, HandleLookups, ListedNames

#: Links are a field of 32 bits in struct fuse_attr, and so are generations for NFS.
_U32_MAX: Final = (1 << 32) - 1
#: renameat2(2), linux/fs.h.
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2


class Validity(NamedTuple):
    """For how long the kernel may keep an answer; also in seconds and ns, as messages have it."""

    valid_s: float
    whole_s: int
    rest_ns: int


def _for(valid_s: float) -> Validity:
    whole_s = int(valid_s)
    return Validity(valid_s, whole_s, int((valid_s - whole_s) * SECOND_NS))


#: The kernel must ask again each time.
_NOT_KEPT: Final = _for(0.0)
#: may_open() in fs/namei.c needs the attributes right after a CREATE, and with a timeout of 0 each
#: store would ask once more. The kernel itself forgets attributes that a write changes.
_CREATED: Final = _for(1.0)
#: For files that only file servers write: these use write(2), never a mapping, so the kernel sees
#: each change. Ganesha asks after each WRITE and after COMMIT.
_CHANGED: Final = _for(1.0)

#: What a file without a name is called while it is made; a temporary name.
_NAMELESS: Final = b".%016x.tmp"
_OF_TMPFILE: Final = os.O_TMPFILE | os.O_EXCL

#: What the kernel is told of an inode: number, record, links, how long it may keep the attributes,
#: generation, how long it may keep the name. A named tuple would cost every LOOKUP 0.2 us.
Entry = tuple[InodeNo, InodeRecord, int, Validity, int, Validity]
#: The answer to a CREATE: handle, how to reach the bytes, the new file.
Created = tuple[HandleNo, Grant, Entry]


class Generations:
    """The generation of each inode, which a handle must name beside the inode's number.

    Inode numbers can be guessed by counting. With one generation for all, a client that may search
    one directory of an export could make up handles of files in others (no_subtree_check).
    """

    def __init__(self, epoch: int, *, alike: bool = False) -> None:
        """*epoch* is the pool's secret of 64 bits; *alike*: it gives all inodes the same one."""
        self._alike = epoch & _U32_MAX if alike else None
        self._key = epoch.to_bytes(8, "little")
        #: The inode asked for last, with its generation: a store asks three times for its own.
        self._last_ino, self._last = ROOT_INODE, 0

    def of(self, ino: InodeNo) -> int:
        """Return the generation of *ino*, of 32 bits.

        It is 0 for the root: the kernel warns of any other one (fuse_lookup_name() in
        fs/fuse/dir.c).
        """
        if ino != self._last_ino:
            self._last_ino, self._last = ino, self._made_for(ino)
        return self._last

    def _made_for(self, ino: InodeNo) -> int:
        if ino == ROOT_INODE:
            return 0
        if self._alike is not None:
            return self._alike
        code = blake2b(ino.to_bytes(8, "little"), key=self._key, digest_size=4)
        return int.from_bytes(code.digest(), "little")


class Answers:
    """The decisions of one mount. Methods that are not coroutines never wait."""

    def __init__(
        self,
        store: Store,
        files: Files,
        settings: Settings,
        generations: Generations,
        removed: Callable[[InodeNo], None],
    ) -> None:
        """*generations* depend on the pool's epoch, so that an NFS handle of another pool is stale.

        *removed* is called for inodes that lost their name.
        """
        self._store = store
        self._namespace = store.namespace
        self._blocks = store.blocks
        self._refusals = store.blocks.truncating.refusals
        self._open_inodes = store.pool.open.inodes
        self._heat = store.pool.rules.heat
        self._looks = store.pool.figures.looks
        self._files = files
        self.by_handle = HandleLookups(store, files)
        self.listed: Final = ListedNames[Entry]()
        self._generation_of = generations.of
        self._request = files.request
        self._removed = removed
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take the timeouts of *settings*."""
        self._name_kept = _for(settings.entry_timeout_s)
        self._attributes_kept = kept = _for(settings.attr_timeout_s)
        ATTR_OUT_HEAD.pack_into(
            self._files.readers.attributes_head, 0, kept.whole_s, kept.rest_ns, 0
        )
        self._absence_kept = _for(settings.negative_timeout_s)
        self._looks.apply(kernel_keeps=settings.negative_timeout_s > 0)

    def lookup(self, parent: InodeNo, name: bytes) -> Entry | Validity:
        """Return what *name* leads to; if nothing, for how long the kernel may cache that."""
        try:
            ino = self._namespace.lookup(parent, name)
            if self._refusals:
                ino = self._second_try(ino)
            record = self._blocks.present(ino)
        except NotFound:
            if name in NAMES:
                return self._node(parent, name)
            if self._refusals:
                self._refusals.looked(self._request.present.tid)
            if self.listed.in_use and (shown := self._shown(parent, name)) is not None:
                return shown
            self._looks.add(parent, name)
            return self._absence_kept
        if record.state in HIDEABLE:
            return self._draft(ino, record)
        self._heat.touch(ino)
        return self.entry(ino, record)

    def _shown(self, parent: InodeNo, name: bytes) -> Entry | None:
        """Return what a listing has just shown a file server's thread as *name*, which is gone now.

        If only the name is gone, the inode's attributes are the present ones.
        """
        shown = self.listed.find(self._request.present.tid, parent, name)
        if shown is None:
            return None
        ino, record, links, _, generation, _ = shown
        if self._store.pool.index.knows(ino):
            return self.entry(ino, self._blocks.present(ino), name_trusted=False)
        return ino, record, links, _CHANGED, generation, _NOT_KEPT

    def _node(self, ino: InodeNo, name: bytes) -> Entry:
        """Return what an NFS handle leads to, or a directory's parent. Raises DeadInode."""
        ino, record = self.by_handle.lookup(ino, name)
        self._heat.touch(ino)
        return self.entry(ino, record)

    def _second_try(self, ino: InodeNo) -> InodeNo:
        """Return the inode for a name that leads to *ino*, after an OPEN of it was refused."""
        who = self._request.present
        may = functools.partial(self._may_empty, who)
        return self._blocks.truncating.looked_up(ino, who.tid, self._files.requester(), may)

    def _may_empty(self, asks: Requester, record: InodeRecord, *, reads: bool) -> bool:
        """Whether the caller *asks* may empty *record*; False if that is unknown."""
        if not self._files.callers.are_named:
            return self._may_as_before(asks.tid, record)
        who = credentials_of(asks.tid)
        if who is None or (who.uid, who.gid) != (asks.uid, asks.gid):
            return False
        sticky = self._namespace.directory(record.parent).mode & stat.S_ISVTX
        return may_empty(record, who, reads=reads, sticky=bool(sticky))

    def _may_as_before(self, tid: int, record: InodeRecord) -> bool:
        """Whether the kernel let thread *tid* open a file just now that is like *record*.

        The same owner, group and mode in the same directory mean the same permissions, whichever
        ids the caller has on its mount; only the kernel knows these.
        """
        refused = self._refusals.get(tid)
        if refused is None or not refused.ino:  # a CREATE: nothing was checked
            return False
        try:
            before = self._blocks.present(refused.ino)
        except DeadInode:
            return False
        return all(
            getattr(before, key) == getattr(record, key) for key in ("parent", "uid", "gid", "mode")
        )

    def _draft(self, ino: InodeNo, record: InodeRecord) -> Entry | Validity:
        """Return what the caller sees under the name of a draft; the kernel must not keep it.

        A caller that must not see the draft finds the old version, or no such name.
        """
        seen = self._store.visibility.seen(ino, record, self._files.requester())
        if seen != ino and self._refusals and self._refusals.joins(self._request.present.tid, ino):
            seen = ino
        if seen is None:
            self._looks.add(record.parent, record.name)
            return _NOT_KEPT
        if seen != ino:
            record = self._blocks.present(seen)
        return self.entry(seen, record, name_trusted=False)

    def attributes(self, ino: InodeNo) -> Entry:
        """Return the attributes of *ino*, also of a removed inode that is open.

        Raises DeadInode.
        """
        record = self._blocks.present(ino)
        if (
            record.state in UNFINISHED
            and self._store.visibility.known_from_before(ino)
            and self._files.requester() != SERVER
        ):
            raise DeadInode(f"inode {ino} was emptied, and is not whole yet")
        entry = self.entry(ino, record)
        return (*entry[:2], 0, *entry[3:]) if self._blocks.is_gone(ino) else entry

    def entry(self, ino: InodeNo, record: InodeRecord, *, name_trusted: bool = True) -> Entry:
        """Return what the kernel is told of *record*, which has a name.

        The kernel must not keep attributes that a writer may change through a mapping, nor a name
        that is not *name_trusted*, or one of two. A directory's links count its subdirectories.
        """
        opened, links = self._open_inodes.get(ino), 1
        kept = self._attributes_kept
        if S_ISDIR(record.mode):
            links = min(2 + record.subdirs, _U32_MAX)
        elif record.target and alias_of(record):
            links, name_trusted = 2, False  # O_TRUNC by one name leads the other to a new inode
        if record.state in UNFINISHED or (opened is not None and opened.writers):
            kept = _CHANGED if opened is not None and opened.only_servers_write else _NOT_KEPT
        return (
            ino,
            record,
            links,
            kept,
            self._generation_of(ino),
            self._name_kept if name_trusted else _NOT_KEPT,
        )

    def create_at_once(self, parent: InodeNo, name: bytes, mode: int, flags: int) -> Created | None:
        """Create and open a file; None if that may have to wait, so that ``create`` must do it.

        It may wait for space, or for the identity of an existing file to go. Raises what
        ``Files.create`` raises.
        """
        who, mode = self._request.present, stat.S_IFREG | stat.S_IMODE(mode)
        try:
            made = self._files.create(parent, name, mode, flags, who.uid, who.gid)
        except NoSpace:
            if self._files.room.lets_begin():
                return None
            raise
        except Exists:
            if not flags & os.O_EXCL:
                return None
            raise
        return self._created(*made)

    async def create(self, parent: InodeNo, name: bytes, mode: int, flags: int) -> Created:
        """Create and open a file; a full pool first evicts something.

        Raises what ``Files.find_room_to_create`` and ``Files.open_or_create`` raise.
        """
        who, mode = self._request.present, stat.S_IFREG | stat.S_IMODE(mode)
        await self._files.find_room_to_create(parent, name, flags)
        made = await self._files.open_or_create(parent, name, mode, flags, who.uid, who.gid)
        return self._created(*made)

    def create_nameless_at_once(self, parent: InodeNo, mode: int, flags: int) -> Created | None:
        """Create and open a file without a name (O_TMPFILE); None and raises: ``create_at_once``.

        While it is made it has a name that nobody knows.
        """
        name = _NAMELESS % secrets.randbits(64)
        made = self.create_at_once(parent, name, mode, flags & ~_OF_TMPFILE | os.O_EXCL)
        return None if made is None else self._without_name(made, parent, name)

    async def create_nameless(self, parent: InodeNo, mode: int, flags: int) -> Created:
        """The same, where that may have to wait. Raises what ``create`` raises."""
        name = _NAMELESS % secrets.randbits(64)
        made = await self.create(parent, name, mode, flags & ~_OF_TMPFILE | os.O_EXCL)
        return self._without_name(made, parent, name)

    def _without_name(self, made: Created, parent: InodeNo, name: bytes) -> Created:
        """Take the *name* of a file that was just *made*. Raises what ``unlink`` raises."""
        fh, grant, (ino, record, _, kept, generation, _) = made
        try:
            self._namespace.unlink(parent, name)
        except BaseException:
            self._files.release(fh)
            raise
        return fh, grant, (ino, record, 0, kept, generation, _NOT_KEPT)

    def _created(self, fh: HandleNo, grant: Grant, ino: InodeNo, record: InodeRecord) -> Created:
        """Return what the kernel is told of a new draft."""
        trusted = self._files.trusts_created(record)
        _, _, links, _, generation, name_kept = self.entry(ino, record, name_trusted=trusted)
        return fh, grant, (ino, record, links, _CREATED, generation, name_kept)

    def made(self, ino: InodeNo) -> Entry:
        """Return the entry of *ino*, which another server made. Raises DeadInode."""
        return self.entry(ino, self._blocks.present(ino))

    def made_nameless(self, ino: InodeNo) -> Entry:
        """Return the entry of *ino*, which another server made without a name. Raises DeadInode.

        It may have been killed before it took the name that *ino* had at first.
        """
        if not self._blocks.is_gone(ino):
            record = self._namespace.record(ino)
            self._namespace.unlink(record.parent, record.name)
        return self.attributes(ino)

    def rename(
        self, parent: InodeNo, name: bytes, new_parent: InodeNo, new_name: bytes, flags: int
    ) -> None:
        """Move a name; *flags* may be RENAME_NOREPLACE or RENAME_EXCHANGE.

        Raises InvalidRequest for other *flags*, and what ``Store.rename`` raises.
        """
        if flags == _RENAME_EXCHANGE:
            request = self._request.present.unique
            self._blocks.last_closes.settle()
            self._namespace.exchange(parent, name, new_parent, new_name, request=request)
            return
        if flags & ~_RENAME_NOREPLACE:
            raise InvalidRequest(f"rename flags {flags:#x}")
        replaced = self._blocks.renames.rename(
            parent,
            name,
            new_parent,
            new_name,
            replace=not flags,
            who=self._files.requester(),
            request=self._request.present.unique,
        )
        if replaced is not None:
            self._removed(replaced)

    def link(self, ino: InodeNo, parent: InodeNo, name: bytes, uid: int) -> Entry:
        """Give *ino* another *name*, for a caller with *uid*. Raises what ``Links.link`` raises."""
        who, request = self._files.requester(), self._request.present.unique
        self._blocks.renames.link(ino, parent, name, who=who, uid=uid, request=request)
        return self.made(ino)

    def open_directory(self, ino: InodeNo) -> HandleNo:
        """Open directory *ino* for a listing. Raises DeadInode, NotADirectory."""
        fh = self._files.open_directory(ino)
        self.by_handle.opened(fh, ino)
        return fh

    def close_directory(self, fh: int) -> None:
        """Close what ``open_directory`` returned. Raises BadHandle."""
        self.by_handle.closed(fh)
        self._files.release(fh)

    def unlink(self, parent: InodeNo, name: bytes) -> None:
        """Remove a file's name. Raises what ``Namespace.unlink`` raises."""
        ino = self._namespace.lookup(parent, name)
        self._blocks.last_closes.publish_now(ino)
        self._store.watch.look_at_removal(ino)
        unnamed = self._namespace.unlink(parent, name, request=self._request.present.unique)
        if unnamed is not None:
            self._removed(unnamed)
