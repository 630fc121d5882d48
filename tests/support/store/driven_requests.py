"""What clients ask of a store, as the mount passes it on. Part of the facade (driven.py)."""

import functools

from kvfs.core.errors import DeadInode
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.attributes import NewAttributes
from kvfs.engine.blocks.publishing import Closing
from kvfs.engine.store import Store
from kvfs.engine.store_figures import Totals, statfs_totals, store_figures
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, SERVER, UNKNOWN_UID, Maker
from kvfs.pool.open.open_inodes import OpenInode
from tests.support.store.inside import At


class Requests:
    """Arguments and errors are those of the engine's methods."""

    engine: Store

    # ---- names ----

    lookup = At(lambda engine: engine.namespace.lookup)
    children = At(lambda engine: engine.namespace.children)
    directory = At(lambda engine: engine.namespace.directory)
    record = At(lambda engine: engine.namespace.record)
    make_node = At(lambda engine: engine.namespace.make_node)
    unlink = At(lambda engine: engine.namespace.unlink)
    rmdir = At(lambda engine: engine.namespace.rmdir)
    exchange = At(lambda engine: engine.namespace.exchange)
    link = At(lambda engine: engine.blocks.renames.link)
    own_root = At(lambda engine: engine.attributes.own_root)

    def rename(
        self,
        parent: InodeNo,
        name: bytes,
        new_parent: InodeNo,
        new_name: bytes,
        *,
        replace: bool = True,
        who: Maker = NOBODY,
    ) -> InodeNo | None:
        """Return the inode that lost its name."""
        return self.engine.blocks.renames.rename(
            parent, name, new_parent, new_name, replace=replace, who=who
        )

    # ---- blocks ----

    create = At(lambda engine: engine.blocks.create)
    open = At(lambda engine: engine.blocks.open)
    open_to_read = At(lambda engine: engine.blocks.open_to_read)
    close = At(lambda engine: engine.blocks.close)
    #: The close of a writer's handle that no client received.
    take_back = At(lambda engine: engine.blocks.last_closes.take_back)
    extent_fd = At(lambda engine: engine.blocks.extent_fd)
    truncate = At(lambda engine: engine.blocks.truncate)
    #: What GETATTR answers: of what is written, as fstat says.
    present = At(lambda engine: engine.blocks.present)
    #: The FLUSH of a descriptor.
    flush = At(lambda engine: engine.blocks.publishing.look_at_closer)
    must_forget = At(lambda engine: engine.blocks.publishing.must_forget)
    forget_durably = At(lambda engine: engine.blocks.publishing.forget_durably)
    #: What a write of so many bytes, and an fallocate(2), would take.
    growth_bytes = At(lambda engine: engine.blocks.allocations.write_growth_bytes)
    allocation_bytes = At(lambda engine: engine.blocks.allocations.growth_bytes)
    begin_allocation = At(lambda engine: engine.blocks.allocations.begin)
    end_allocation = At(lambda engine: engine.blocks.allocations.end)

    def load(self, ino: InodeNo, *, uid: int = 0, thread: int = 1, flags: int = 0) -> None:
        """Open block *ino* to read and close it, with an idle moment between the two."""
        opened = self.open_to_load(ino, uid=uid, thread=thread, flags=flags)
        while self.engine.pool.background.run_one():
            pass
        self.engine.blocks.close(opened, writer=False)

    def open_to_load(self, ino: InodeNo, *, uid: int, thread: int, flags: int = 0) -> OpenInode:
        """Open block *ino* to read, as the mount does, which tells what reads ahead."""
        blocks, ahead = self.engine.blocks, self.engine.read_ahead
        opened = blocks.open_to_read(ino)
        if ahead is not None:
            ahead.opened(ino, blocks.present(ino).size_bytes, flags, uid, thread)
        return opened

    def last_flush(
        self,
        opened: OpenInode | None,
        fate: Fate,
        tid: int,
        closer: Maker,
        *,
        at_s: float | None = None,
    ) -> Closing:
        """Return what ``close`` is told of the last FLUSH, by *tid* of *closer*: his *fate*.

        *opened* is as it is now; None: it was never a descriptor of a process.
        """
        pool = self.engine.pool
        now_s = pool.monotonic_s() if at_s is None else at_s
        if opened is None:
            return Closing(tid, closer, fate, now_s, -1, 0)
        status = pool.syscalls.fstat(opened.fd)
        return Closing(tid, closer, fate, now_s, status.st_size, status.st_mtime_ns)

    # ---- what a file server asks, which is no process ----

    must_ask = At(lambda engine: engine.blocks.served.must_ask)
    serve = At(lambda engine: engine.blocks.served.opened)

    def open_served(
        self, ino: InodeNo, *, writer: bool, truncate: bool = False, passing: bool = False
    ) -> OpenInode:
        """OPEN by a server; ``close_served`` is its RELEASE. *passing*: on passthrough."""
        blocks = self.engine.blocks
        opened = blocks.open(ino, writer=writer, truncate=truncate, maker=SERVER)
        blocks.served.opened(opened, writer=writer, passing=passing)
        return opened

    def close_served(self, opened: OpenInode, *, writer: bool, passing: bool = False) -> None:
        """Close one of a server's handles."""
        writes = self.engine.blocks.served.closed(opened, writer=writer, passing=passing)
        self.engine.blocks.close(opened, writer=writes)

    # ---- attributes ----

    take_hints = At(lambda engine: engine.take_hints.carry_out)
    set_xattr = At(lambda engine: engine.attributes.set_xattr)
    remove_xattr = At(lambda engine: engine.attributes.remove_xattr)
    xattr = At(lambda engine: engine.attributes.xattr)
    xattr_names = At(lambda engine: engine.attributes.xattr_names)

    def change(self, ino: InodeNo, **wanted: int | None) -> InodeRecord:
        """SETATTR of *wanted*, the fields of ``NewAttributes``; return the record as of now."""
        return self.engine.attributes.change(ino, NewAttributes(**wanted))

    # ---- O_TRUNC, and its second try ----

    admits_truncating = At(lambda engine: engine.blocks.truncating.admits)
    #: A LOOKUP of a thread whose OPEN was refused, and one that found nothing.
    looked_up = At(lambda engine: engine.blocks.truncating.looked_up)
    looked_in_vain = At(lambda engine: engine.blocks.truncating.refusals.looked)

    def require_right(self, ino: InodeNo) -> None:
        """Compare *ino* with its checksum if that is due, as an OPEN does. Raises DeadInode."""
        verifier = self.engine.verifier
        look = verifier.begin(ino) if verifier.is_due(ino) else None
        if look is not None and not verifier.judge(look, verifier.read(look)):
            raise DeadInode(f"inode {ino} has other bytes than were stored")

    def supersede(self, ino: InodeNo, thread: int) -> InodeNo:
        """Give the name of *ino* to a fresh inode, which *thread* opens next."""
        record = self.engine.namespace.record(ino)
        return self.engine.blocks.truncating.supersede(ino, record, NOBODY, thread=thread)

    # ---- who sees what ----

    seen = At(lambda engine: engine.visibility.seen)
    hidden = At(lambda engine: engine.visibility.hidden)
    is_private = At(lambda engine: engine.visibility.is_private)
    trusts_name = At(lambda engine: engine.visibility.trusts_name)
    known_from_before = At(lambda engine: engine.visibility.known_from_before)

    # ---- the whole pool ----

    def totals(self) -> Totals:
        """Return the pool's size and what is free, as statfs(2) tells users that have no quota."""
        return statfs_totals(self.engine.pool, UNKNOWN_UID, ROOT_INODE)

    describe = At(lambda engine: functools.partial(store_figures, engine))
