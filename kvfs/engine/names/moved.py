"""What a rename changes in the inode that moves: its state, and what depends on its name."""

import stat

from kvfs.core.lifecycle import UNFINISHED, Event, State, after
from kvfs.core.second_tries import Place, Recent
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.tree_change import Move
from kvfs.machine.processes import Maker
from kvfs.pool.open.measure import measured
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.ports import Room
from kvfs.pool.pool import Pool


def _publishes(opened: OpenInode | None, record: InodeRecord, who: Maker | None) -> bool:
    """Whether a rename by *who* publishes *record* at once, and not at its last close."""
    if not stat.S_ISREG(record.mode):
        return False
    if opened is None or not opened.writers:
        # A draft without a writer waits for its OPEN (truncating_open.py) and has no bytes yet.
        return record.state not in UNFINISHED
    own = record.state in UNFINISHED and (who is None or who == opened.maker)
    return own and not opened.torn


def renamed(
    pool: Pool, opened: OpenInode | None, record: InodeRecord, who: Maker | None
) -> InodeRecord:
    """Return *record* as a rename by *who* to another name leaves it: a block is published."""
    if not _publishes(opened, record, who):
        return record
    state = after(State(record.state), Event.RENAME)
    if opened is not None and opened.writers and opened.fd >= 0:
        # It was renamed before its close (llm-d), or the RELEASE comes after the RENAME.
        now = measured(pool.syscalls, opened, record)
        record = now._replace(allocated_bytes=record.allocated_bytes)
    return record._replace(state=state, maker_tgid=0, maker_birth=0)


def follow(pool: Pool, room: Room, former_names: Recent[InodeNo, Place], move: Move) -> None:
    """Apply the new directory's policies (who sees drafts, ranks) after *move* was committed."""
    ino, before, record = move
    former_names.note(ino, (before.parent, before.name), pool.monotonic_s())
    is_directory = stat.S_ISDIR(record.mode)
    if not is_directory and record.state not in UNFINISHED:
        return
    left, inherited = (pool.policies.of(above) for above in (before.parent, record.parent))
    if pool.settings.policies or left.hides_drafts != inherited.hides_drafts:
        show_drafts_anew(pool)
    ranks_differ = (left.evict, left.pin) != (inherited.evict, inherited.pin)
    if is_directory and (pool.settings.policies or ranks_differ):
        room.rank_anew()


def show_drafts_anew(pool: Pool) -> None:
    """Drop draft names from the kernel's cache, because it changed who may see them."""
    for ino in pool.open_inodes.written:
        record = pool.index.inode_or_miss(ino)
        if record is not None and record.state in UNFINISHED:
            pool.kernel.name_vanished(record.parent, record.name)
