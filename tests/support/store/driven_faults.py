"""Damage to a store, and what fails or is made small in it. Part of the facade (driven.py)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

import pytest

from kvfs.core.eviction_policy import Adaptive
from kvfs.core.types import InodeNo
from kvfs.engine.store import Store
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool_change import Follower, Followers
from kvfs.storage.index_transaction import WriteTransaction
from tests.support.store.inside import At

#: Numbers inside the engine that a test makes small, or large.
_LIMITS: Final = {
    "log that is copied": "kvfs.pool.durable.drive_log._LOG_LEAST_BYTES",
    "doubts": "kvfs.engine.blocks.closes._DOUBTS_MAX",
    "leases that are looked at": "kvfs.engine.blocks.lease_ends._LOOKS_MAX",
    "blocks of a batch": "kvfs.engine.durability.batch._BLOCKS_MAX",
    "bytes of a batch": "kvfs.engine.durability.batch._BYTES_MAX",
    "blocks known to be right": "kvfs.engine.durability.verifier._KNOWN_MAX",
    "rows not logged": "kvfs.pool.pool.UNLOGGED_MOST_BYTES",
    "rows of a sample": "kvfs.engine.store_figures._LOOKED_AT_MAX",
    "steps in vain": "kvfs.engine.by_command._VAIN_MAX",
    "blocks tried to read": "kvfs.engine.recovery.device_errors._INODES_MAX",
    "names of a plan": "kvfs.engine.eviction.by_limits._PLAN_MAX",
    "plan_blocks": "kvfs.engine.eviction.reclaim._PLAN_MAX",
    "plan_refused": "kvfs.engine.eviction.victims._REFUSED_MAX",
    "plan_inline_rows": "kvfs.engine.eviction.victims._INLINE_ROWS",
    "pins_counted": "kvfs.pool.rules.ranks._COUNTED_MAX",
    "pins_step": "kvfs.pool.rules.ranks._STEP",
    "looks a tick": "kvfs.engine.eviction.overrun_watch._LOOKS_A_TICK",
    "looks_a_draft": "kvfs.pool.allocator._LOOKS_A_DRAFT",
    "write_back_looks_s": "kvfs.engine.recovery.device_errors.LOADED_S",
}
#: Moments of a start or a check at which a test ends it.
_MOMENTS: Final = {
    "rebuild joins": "kvfs.engine.recovery.rebuild._Rebuild._join",
    "rebuild runs": "kvfs.engine.recovery.rebuild._Rebuild.run",
    "rows are checked": "kvfs.engine.recovery.fsck.RowCheck.run",
    "a block is tried to read": "kvfs.engine.recovery.device_errors.is_legible",
    "a lock is looked for": "kvfs.engine.rewrite.findings.holders",
    "index is compacted": "kvfs.engine.recovery.recovery.compact_index",
    "a sweep begins": "kvfs.engine.recovery.sweep.Sweep.start",
}


def set_limit(patch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """Set one of ``_LIMITS`` for as long as *patch* holds."""
    patch.setattr(_LIMITS[name], value)


def stand_in(patch: pytest.MonkeyPatch, moment: str, call: Callable[..., Any]) -> None:
    """Let *call* stand for one of ``_MOMENTS``."""
    patch.setattr(_MOMENTS[moment], call)


def add_follower(patch: pytest.MonkeyPatch, one: Follower) -> None:
    """Let pools have *one* more follower, in the one line that lists them."""
    patch.setattr("kvfs.pool.pool.Followers", lambda *others: Followers(*others, one))


@contextlib.contextmanager
def reading_here() -> Iterator[None]:
    """Let starts and checks read the index without a child first: a fork takes most of the time."""
    with (
        mock.patch("kvfs.engine.recovery.recovery.refuse_broken"),
        mock.patch("kvfs.engine.recovery.recovery.refuse_unreadable"),
        mock.patch("kvfs.engine.recovery.fsck.refuse_unreadable"),
    ):
        yield


class Faults:
    """What holds for as long as a *patch* does, or for good."""

    engine: Store

    def hear_of_failed_read(self, drive: int) -> None:
        """Let the kernel's log say that *drive* failed to read."""
        watch = self.engine.device_watch.drives[drive]
        watch._unreadable.suspect(self.engine.pool.monotonic_s())

    # ---- rows ----

    def write_rows(self, *, lasting: bool = True) -> AbstractContextManager[WriteTransaction]:
        """Return a transaction on the index that asks no rule."""
        return self.engine.pool.index.write(lasting=lasting)

    def spoil_row(self, key: bytes, value: bytes = b"garbage") -> None:
        """Put *value* where the index has a row, or none."""
        with self.write_rows() as txn:
            txn._rows[key] = value

    #: A transaction that changes nothing but the counts.
    count_anew = At(lambda engine: engine.pool.change)
    grow_index = At(lambda engine: engine.pool.index.preallocate)
    #: Read from the index again what it has parsed: it keeps so many rows.
    forget_parsed = At(lambda engine: engine.pool.index.records.clear)
    forget_policies = At(lambda engine: engine.pool.rules.policies.clear)
    identify_node = At(lambda engine: engine.pool.extents.identify_node)

    #: Take the identity of a block from its extent, and let nobody notice.
    drop_identity = At(lambda engine: engine.pool.extents.unidentify)

    def overwrite_file(self, name: str, offset_bytes: int, data: bytes) -> None:
        """Write over a part of a file of the pool, durably."""
        fd = os.open(name, os.O_WRONLY, dir_fd=self.engine.pool.device.pool_fd)
        try:
            os.pwrite(fd, data, offset_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)

    def identify(self, ino: InodeNo) -> None:
        """Call *ino* durable, whatever its bytes are."""
        pool = self.engine.pool
        record = pool.index.inode(ino)
        assert record is not None
        pool.durable.identities.write_durable(ino, record, has_holes=False)

    def identify_otherwise(self, ino: InodeNo, *, mtime_ns: int) -> None:
        """Let the device say of *ino* that its bytes are of *mtime_ns*."""
        extents = self.engine.pool.extents
        identity = extents.identity(ino)
        assert identity is not None
        extents.identify(ino, identity._replace(mtime_ns=mtime_ns))

    def leave_note_of(self, opened: OpenInode) -> None:
        """Let the note be left that *opened* has a writer, as by a kill before its end."""
        self.engine.pool.open.notes.writing(opened)

    def find_outdated(self, ino: InodeNo) -> None:
        """Let the sweep have found that the identity of *ino* is to be written, and not do it."""
        self.engine.sweep._outdated.append(ino)

    def fail_walk(self, patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
        """Let *call* stand for the walk over the rows of the index."""
        patch.setattr(self.engine.pool.index, "walk", call)

    def fail_rows(self, patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
        """Let *call* stand for the reading of an inode's row."""
        patch.setattr(self.engine.pool.index, "inode_or_miss", call)

    def fail_commit(self, patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
        """Let *call* stand for the commit of LMDB."""
        patch.setattr(self.engine.pool.index._syscalls, "commit", call)

    def pretend_hopeful(self, patch: pytest.MonkeyPatch, hopeful: Callable[[], bool]) -> None:
        """Let *hopeful* say whether room may come soon."""
        patch.setattr(self.engine.reclaim, "hopeful", lambda _: hopeful())

    def fail_saving(self, patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
        """Let *call* stand for the chore that saves the heat."""
        patch.setattr(self.engine.pool.rules.heat, "save_due", call)

    def fill_device(self, patch: pytest.MonkeyPatch) -> None:
        """Let others have taken all that was free on the device."""
        for drive in self.engine.pool.space.drives.all:
            patch.setattr(drive.device_room, "_free_bytes", lambda: 0)

    def note_calls(self, patch: pytest.MonkeyPatch, what: str, call: Callable[..., Any]) -> None:
        """Let *call* hear of each call of *what*, one of those below, before it is made."""
        owner, name = {
            "listing": (self.engine.pool.index, "children"),
            "search": (self.engine.reclaim, "search_anew"),
            "plan of empty names": (self.engine.name_eviction._of_empty._victims, "replan"),
            "sync": (self.engine.durable_pass, "goal"),
            "durable": (self.engine.pool.extents, "make_durable"),
            "use": (self.engine.pool.rules.heat.policy, "used"),
        }[what]
        made = getattr(owner, name)

        def noted(*args: object, **kwargs: object) -> object:
            call(*args, **kwargs)
            return made(*args, **kwargs)

        patch.setattr(owner, name, noted)

    def sample_all(self, patch: pytest.MonkeyPatch) -> None:
        """Let a policy hear of each use of a block, and not only of a few blocks' uses."""
        policy = Adaptive()
        patch.setattr(policy._shadows, "sample_bits", 0)
        patch.setattr(self.engine.pool.rules.heat, "policy", policy)

    def put_in_doubt(self, patch: pytest.MonkeyPatch) -> None:
        """Have the index in doubt about inodes, as after a power loss."""
        patch.setattr(self.engine.namespace.proofs, "in_doubt", True)

    def hold_thread(self, patch: pytest.MonkeyPatch) -> None:
        """Let no long job begin: the thread is busy."""
        patch.setattr(self.engine.pool.background, "submit_long", lambda _job: None)

    def let_all_live(self, patch: pytest.MonkeyPatch) -> None:
        """Let no process have ended."""
        patch.setattr(self.engine.pool.rules.leases.processes, "lives", lambda _: True)
