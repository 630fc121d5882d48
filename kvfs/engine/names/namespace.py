"""Names: lookup, listing, and every change of the tree.

Each change is one index transaction; removed extents are unlinked after its commit. The kernel
checks permissions. Directories have times as in POSIX: a changed listing changes mtime and ctime.
"""

import stat
from typing import Final, Protocol

from kvfs.core.changed import Why
from kvfs.core.errors import (
    Damaged,
    DeadInode,
    Exists,
    InvalidRequest,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
    ReadOnly,
)
from kvfs.core.inode_rules import new_record, refuse_loop, refuse_mismatch
from kvfs.core.lifecycle import State, carries_identity
from kvfs.core.rewriting import FORMER_NAME, Place, Recent
from kvfs.core.types import (
    NAME_MAX_BYTES,
    NO_INODE,
    TARGET_MAX_BYTES,
    InodeNo,
    InodeRecord,
)
from kvfs.engine.names.tree_change import (
    Move,
    TreeChange,
    bearer,
    directory_record,
    follow,
    has_two,
    renamed,
)
from kvfs.machine.processes import Maker
from kvfs.pool.allocator import Allocator, require_node
from kvfs.pool.figures.looks import CREATE_LOOK_S, RENAME_LOOK_S
from kvfs.pool.open.ports import Closes
from kvfs.pool.pool import Pool

#: A listing is read from the index in steps of this many names.
LISTING_STEP: Final = 256


class Promises(Protocol):
    """Fresh inodes whose OPEN is still to come; they are kept for it even without a name."""

    def promised(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether *ino*, which lost its name, is one. If so, it becomes an open inode."""

    def keep_promise(self, ino: InodeNo) -> None:
        """Note that *ino* was kept for its OPEN."""


class Proofs(Protocol):
    """Compares inodes with their files, after a power loss, before they are used."""

    #: Whether the index may be wrong about any.
    in_doubt: bool

    def prove(self, ino: InodeNo) -> bool:
        """Return whether the index was right about *ino*; else correct it."""


class Namespace:
    """The tree of one pool."""

    def __init__(
        self, pool: Pool, allocator: Allocator, promises: Promises, proofs: Proofs
    ) -> None:
        self._pool = pool
        self.proofs: Final = proofs
        self._allocator = allocator
        self._promises = promises
        self._identities = pool.durable.identities
        #: Each inode's name before its last rename: clients may have looked it up by that one.
        self.former_names: Recent[InodeNo, Place] = Recent(FORMER_NAME)

    # ---- looking ----

    def lookup(self, parent: InodeNo, name: bytes) -> InodeNo:
        """Return the inode of *name* in *parent*. Raises NotFound, NameTooLong."""
        ino = self._find(parent, name)
        if ino is not None:
            return ino
        if len(name) > NAME_MAX_BYTES:
            raise NameTooLong(f"{len(name)} bytes")
        raise NotFound

    def _find(self, parent: InodeNo, name: bytes) -> InodeNo | None:
        """Return the inode of *name*, None for a miss. A name with damaged rows is dropped."""
        pool = self._pool
        try:
            ino = pool.index.lookup(parent, name)
        except Damaged as error:
            pool.damage.miss_name(parent, name, None, str(error))
            return None
        if ino is not None and ino in pool.damage.inodes:
            pool.damage.miss_name(parent, name, ino, "damaged inode record")
            return None
        if ino is not None and self.proofs.in_doubt and not self.proofs.prove(ino):
            return pool.index.lookup(parent, name)
        return ino

    def record(self, ino: InodeNo) -> InodeRecord:
        """Return the record of *ino*, also of a removed inode that is open.

        Raises DeadInode. Raises Damaged once; the next lookup of the name finds nothing.
        """
        opened = self._pool.open.inodes.get(ino)
        if opened is not None and opened.gone is not None:
            opened.require_bytes()
            return opened.gone
        try:
            if self.proofs.in_doubt:
                self.proofs.prove(ino)
            record = self._pool.index.inode(ino)
        except Damaged:
            self._pool.damage.inodes.add(ino)
            raise
        if record is None:
            raise DeadInode(f"inode {ino}")
        return record

    def directory(self, ino: InodeNo) -> InodeRecord:
        """Return the record of directory *ino*. Raises DeadInode, NotADirectory."""
        return directory_record(self._pool.index, ino)

    def children(self, parent: InodeNo, after: InodeNo) -> list[tuple[InodeNo, bytes]]:
        """Return the next names of *parent* after cookie *after*, in the order of creation.

        A cookie is an inode number, so names that come and go do not move the others.
        """
        found = self._children(parent, after)
        doubted = found if self.proofs.in_doubt else []
        # Not any(): each of them is to be compared.
        changed = [ino for ino, _ in doubted if not self.proofs.prove(ino)]
        return self._children(parent, after) if changed else found

    def _children(self, parent: InodeNo, after: InodeNo) -> list[tuple[InodeNo, bytes]]:
        try:
            return self._pool.index.children(parent, after, LISTING_STEP)
        except Damaged:
            return self._pool.damage.legible(parent, after, LISTING_STEP)

    # ---- changing ----

    def require_free(self, parent: InodeNo, name: bytes) -> InodeRecord:
        """Return *parent*'s record if *name* can be created in it.

        Raises Exists, NameTooLong, NotADirectory, DeadInode, ReadOnly.
        """
        if self._pool.settings.read_only:
            raise ReadOnly
        if len(name) > NAME_MAX_BYTES:
            raise NameTooLong(f"{len(name)} bytes")
        if name in (b".", b"..") or self._find(parent, name) is not None:
            raise Exists
        self._pool.figures.looks.stored(parent, name, CREATE_LOOK_S)
        return directory_record(self._pool.index, parent)

    def new_number(self) -> InodeNo:
        """Return the number of a new inode without bytes. Raises NoSpace, NotAtHand, OSError.

        Blocks may be evicted for its name.
        """
        self._allocator.require_name()
        self._pool.numbers.require(at_once=not self._pool.background.is_serving)
        return self._pool.numbers.give_out()

    def make_node(
        self,
        parent: InodeNo,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        target: bytes = b"",
        *,
        request: int = 0,
        asks: int | None = None,
    ) -> tuple[InodeNo, InodeRecord]:
        """Make a directory, symlink, fifo or socket. Raises what ``require_free`` raises.

        *request* is the number of the client's request, here and below; 0: there is none. *asks* is
        the user whose bound counts; None: the owner.
        """
        if stat.S_ISLNK(mode) and not 0 < len(target) <= TARGET_MAX_BYTES:
            raise NameTooLong(f"target of {len(target)} bytes")
        pool = self._pool
        pool.figures.looks.made(parent, name)
        # All checks come first, so that nothing is evicted for a request that is refused.
        self.require_free(parent, name)
        require_node(pool, uid if asks is None else asks)
        ino = self.new_number()
        parent_record = self.directory(parent)  # again, as blocks may have been evicted from it
        now_ns = pool.clock_ns()
        record = new_record(parent, name, mode, uid, gid, now_ns, parent_record)
        record = record._replace(
            state=State.NODE,
            sequence=pool.counters.next_sequence,
            target=target,
            size_bytes=len(target),
        )
        with TreeChange(pool, now_ns) as change:
            change.link(ino, record)
            change.does(request, ino)
        return ino, record

    def unlink(self, parent: InodeNo, name: bytes, *, request: int = 0) -> InodeNo | None:
        """Remove the name of a file, symlink or special file; return its inode if it had no other.

        Its space is freed after the last handle. Raises NotFound, IsADirectory.
        """
        return self._remove(parent, name, directory=False, request=request)

    def lose(self, ino: InodeNo) -> None:
        """Remove the name of block *ino*, which is lost or incomplete, and tell the kernel.

        Raises DeadInode, Damaged, NoSpace, OSError, ReadOnly.
        """
        if self._pool.settings.read_only:
            raise ReadOnly
        record = self.record(ino)
        self._drop_name(ino, record, Why.LOST)
        self._pool.kernel.name_vanished(record.parent, record.name)
        self._pool.kernel.unnamed(ino)

    def rmdir(self, parent: InodeNo, name: bytes, *, request: int = 0) -> InodeNo | None:
        """Remove an empty directory; return its inode. Raises NotFound, NotADirectory, NotEmpty."""
        if name == b".":
            raise InvalidRequest
        if name == b"..":
            raise NotEmpty
        return self._remove(parent, name, directory=True, request=request)

    def _remove(
        self, parent: InodeNo, name: bytes, *, directory: bool, request: int
    ) -> InodeNo | None:
        pool = self._pool
        if pool.settings.read_only:
            raise ReadOnly
        ino = self.lookup(parent, name)
        record = self.record(ino)
        if stat.S_ISDIR(record.mode) != directory:
            raise NotADirectory if directory else IsADirectory
        if record.entries:
            raise NotEmpty
        if record.target and has_two(pool.index, record):
            with TreeChange(pool, pool.clock_ns()) as change:
                kept = change.part(ino, record, parent, name)
                change.does(request, ino)
            self.moved(kept)
            return None
        self._drop_name(ino, record, Why.REMOVED, request)
        return ino

    def _drop_name(self, ino: InodeNo, record: InodeRecord, why: Why, request: int = 0) -> None:
        now_ns = self._pool.clock_ns()
        with TreeChange(self._pool, now_ns, keeps=True) as change:
            change.unlink(ino, record, why)
            change.does(request, ino)
        self.keep_removed(ino, record, now_ns)

    def keep_removed(self, ino: InodeNo, record: InodeRecord, now_ns: int) -> None:
        """Keep *ino*, which the index has no more, for its handles, or without any for a moment."""
        pool = self._pool
        promised = self._promises.promised(ino, record)
        opened = pool.open.inodes.get(ino)
        pool.space.of(ino).extra_bytes += record.allocated_bytes
        if opened is not None:
            opened.lose_name(record._replace(ctime_ns=now_ns))
            if not opened.writers:
                opened.hold(record.allocated_bytes)
            if stat.S_ISREG(record.mode) and carries_identity(record):
                # A reader may keep it for hours, and a power loss must not bring the name back.
                self._identities.withdraw(ino)
        else:
            pool.departures.removed.keep(ino, record._replace(ctime_ns=now_ns), pool.monotonic_s())
        if promised:
            self._promises.keep_promise(ino)

    def rename(
        self,
        parent: InodeNo,
        name: bytes,
        new_parent: InodeNo,
        new_name: bytes,
        *,
        replace: bool = True,
        who: Maker | None = None,
        request: int = 0,
        closes: Closes | None = None,
    ) -> InodeNo | None:
        """Move a name, over an existing one if *replace*. Return the inode that lost its name.

        *who* is the calling process, or None: a draft that another process writes is published at
        its last close. One that waits in *closes* is done by the same transaction. Readers of a
        replaced block keep its bytes, and it its other name. Raises NotFound, Exists, NotEmpty,
        NotADirectory, IsADirectory, InvalidRequest, NameTooLong.
        """
        pool = self._pool
        if pool.settings.read_only:
            raise ReadOnly
        ino = self.lookup(parent, name)
        record = self.record(ino)
        if len(new_name) > NAME_MAX_BYTES:
            raise NameTooLong(f"{len(new_name)} bytes")
        if stat.S_ISDIR(record.mode):
            refuse_loop(self.directory, ino, new_parent)
        replaced, replaced_record = self._find(new_parent, new_name), None
        pool.figures.looks.stored(new_parent, new_name, RENAME_LOOK_S)
        if replaced is not None:
            if not replace:
                raise Exists
            if replaced == ino:
                return None
            replaced_record = self.record(replaced)
            refuse_mismatch(record, replaced_record)
        if record.target:
            ino, record = bearer(pool.index, parent, name, ino, record)
        parts = replaced_record is not None and has_two(pool.index, replaced_record)
        now_ns, sequence = pool.clock_ns(), pool.counters.next_sequence
        opened = pool.open.inodes.get(ino)
        closed, kept = None, None
        if closes is not None and opened is not None and opened.writers:
            closed = closes.closed(opened, record)
        moved = closed or renamed(pool.syscalls, opened, record, who)
        moved = moved._replace(parent=new_parent, name=new_name, ctime_ns=now_ns, sequence=sequence)
        why, finished = (Why.RENAMED, NO_INODE) if closed is None else (Why.STORED, ino)
        # Atomic: no checkpoint from here until the name is visible.
        with TreeChange(pool, now_ns, finished=finished, keeps=True) as change:
            if replaced is not None and replaced_record is not None:
                if parts:
                    kept = change.part(replaced, replaced_record, new_parent, new_name)
                else:
                    change.unlink(replaced, replaced_record, Why.REPLACED)
            change.move(move := Move(ino, record, moved), why=why)
            change.does(request, ino)
        if closed is not None and closes is not None and opened is not None:
            closes.published(opened, moved.allocated_bytes - record.allocated_bytes)
        elif opened is not None and opened.writers:
            opened.move()
            pool.open.notes.writing(opened)
        follow(pool, self._allocator.room, self.former_names, move)
        if parts:
            self.moved(kept)
            return None
        if replaced is not None and replaced_record is not None:
            self.keep_removed(replaced, replaced_record, now_ns)
        return replaced

    def moved(self, move: Move | None) -> None:
        """Note *move*, if there is one: a block got another name, and no client renamed it."""
        if move is not None:
            follow(self._pool, self._allocator.room, self.former_names, move)

    def exchange(
        self,
        parent: InodeNo,
        name: bytes,
        new_parent: InodeNo,
        new_name: bytes,
        *,
        request: int = 0,
    ) -> None:
        """Swap two existing names atomically (RENAME_EXCHANGE). Raises NotFound, ReadOnly."""
        pool = self._pool
        if pool.settings.read_only:
            raise ReadOnly
        one, other = self.lookup(parent, name), self.lookup(new_parent, new_name)
        if one == other:
            return
        now_ns, sequence = pool.clock_ns(), pool.counters.next_sequence
        moves: list[Move] = []
        here, there = (parent, name), (new_parent, new_name)
        for found, place, (to, to_name) in ((one, here, there), (other, there, here)):
            ino, record = bearer(pool.index, *place, found, self.record(found))
            if stat.S_ISDIR(record.mode):
                refuse_loop(self.directory, ino, to)
            moved = record._replace(parent=to, name=to_name, ctime_ns=now_ns, sequence=sequence)
            if record.state == State.UNRENAMED:
                moved = moved._replace(state=State.PUBLISHED, maker_tgid=0, maker_birth=0)
            moves.append(Move(ino, record, moved))
        self._identities.foretell(other)  # the request is noted for ``one`` alone
        with TreeChange(pool, now_ns) as change:
            change.move(*moves)
            change.does(request, one)
        for move in moves:
            follow(pool, self._allocator.room, self.former_names, move)
