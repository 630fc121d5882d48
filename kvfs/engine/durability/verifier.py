"""Compares blocks with their checksums: at their first open, by command, or all over time (scrub).

The device's bytes are read in a thread, past the page cache. A block with other bytes than were
stored becomes a miss: it loses its name, and its extent goes into the quarantine.
"""

import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import Any, Final, NamedTuple

from kvfs.core.errors import Damaged, KvfsError, NotAtHand
from kvfs.core.lifecycle import carries_identity
from kvfs.core.records import HAS_CRC, HAS_HOLES, INODE_PREFIX, Identity, inode_key, parse_inodes
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.engine.blocks.publishing import Publishing
from kvfs.pool.pool import Pool
from kvfs.storage.background import Aside
from kvfs.storage.direct_open import open_direct
from kvfs.storage.extent_bytes import device_crc, new_buffer
from kvfs.storage.kept_aside import Quarantine

_log: Final = logging.getLogger(__name__)

#: Most blocks remembered as right, at some 100 B each; a forgotten one is compared again.
_KNOWN_MAX: Final = 65_536
#: Rows that the scrub reads at a time.
_ROWS: Final = 64


class ChecksumResult(Enum):
    """What a look at a block's bytes found."""

    RIGHT = "right"
    WRONG = "wrong"
    UNREADABLE = "unreadable"
    #: It has no checksum, or is gone, or somebody writes it.
    UNKNOWN = "unknown"


class BlockToCompare(NamedTuple):
    """A block whose bytes are to be compared with what its identity says, and its record."""

    ino: InodeNo
    identity: Identity
    record: InodeRecord


class Verifier:
    """The comparisons of one pool. Only ``read`` belongs to other threads."""

    def __init__(self, pool: Pool, publishing: Publishing) -> None:
        settings = pool.settings
        self._pool = pool
        self._publishing = publishing
        self._mode = settings.verify
        #: Blocks with a lower serial number are compared at their first open; 0: none is.
        self.below = NO_INODE
        if settings.verify in ("open", "scrub"):
            self.below = pool.numbers.first
        elif settings.verify == "doubtful":
            self.below = pool.run.doubtful_below
        self._known: OrderedDict[InodeNo, None] = OrderedDict()
        self._quarantine = Quarantine(
            pool.device.pool_fds,
            pool.syscalls,
            settings.quarantine_files_max,
            settings.quarantine_bytes,
        )
        #: Its blocks and their bytes as last read: a status must not ask a device that is gone.
        self._quarantined: dict[InodeNo, int] = {}
        self._look_at_quarantine()
        self._local = threading.local()
        self._scrub: Aside[tuple[BlockToCompare, ChecksumResult, int | None]] = Aside("kvfs-scrub")
        #: The last row that the scrub read, and whether it could look at all blocks of this round.
        self._after, self._whole = b"", True
        self._next_s = self._stored_s = 0.0
        self._seen = pool.counters.sequence
        self.right = self.wrong = self.unreadable = self.rounds = self.given = 0
        pool.ends_first(self._scrub.join)

    def is_due(self, ino: InodeNo) -> bool:
        """Whether block *ino* must be compared before it is opened."""
        below = self.below
        return below > 0 and self._pool.numbers.serial(ino) < below and ino not in self._known

    def begin(self, ino: InodeNo) -> BlockToCompare | None:
        """Return what to compare for block *ino*; None if it has no checksum.

        Raises Damaged if its identity cannot be read, and removes its name; NoSpace, NotAtHand,
        OSError.
        """
        look = self._to_compare(ino)
        if look is None or not look.identity.flags & HAS_CRC:
            self._know(ino)
            return None
        return look

    def _to_compare(self, ino: InodeNo) -> BlockToCompare | None:
        """Return what the identity of block *ino* says; None if it has none. Raises as begin."""
        pool = self._pool
        record, opened = pool.index.inode_or_miss(ino), pool.open.inodes.get(ino)
        writes = opened is not None and opened.writers
        if (
            record is None
            or writes
            or ino in pool.durable.not_durable
            or not carries_identity(record)
        ):
            return None
        if not stat.S_ISREG(record.mode):
            return None
        try:
            identity = pool.at_hand.identity(ino)
        except Damaged:  # nothing says any more what the block is; the next lookup is a miss
            self._publishing.dismiss_lost(ino)
            raise
        return None if identity is None else BlockToCompare(ino, identity, record)

    def read(self, look: BlockToCompare) -> ChecksumResult:
        """Compare, in a thread, which reads the whole block from the device."""
        return self._read(look)[0]

    def _read(self, look: BlockToCompare) -> tuple[ChecksumResult, int | None]:
        """Read the whole block; return also its checksum, None if it cannot be read."""
        pool = self._pool
        if not hasattr(self._local, "buffer"):
            self._local.buffer = new_buffer()
        try:
            fd = self._open(look.ino)
        except Damaged:
            return ChecksumResult.UNREADABLE, None
        try:
            crc = device_crc(pool.syscalls, fd, look.identity.size_bytes, self._local.buffer)
        except OSError as error:
            _log.error("inode %#x cannot be read: %s", look.ino, error)
            return ChecksumResult.UNREADABLE, None
        finally:
            pool.syscalls.close(fd)
        if not look.identity.flags & HAS_CRC:
            return ChecksumResult.UNKNOWN, crc
        is_right = crc == look.identity.content_crc
        return ChecksumResult.RIGHT if is_right else ChecksumResult.WRONG, crc

    def _open(self, ino: InodeNo) -> int:
        return open_direct(lambda direct: self._pool.extents.open(ino, os.O_RDONLY | direct))

    def judge(self, look: BlockToCompare, verdict: ChecksumResult) -> bool:
        """Act on *verdict*; return whether the block may be opened. Raises NoSpace, OSError."""
        pool, ino = self._pool, look.ino
        # Atomic: the block may have been written, or be gone, since the comparison began.
        if verdict is ChecksumResult.RIGHT:
            self.right += 1
            self._know(ino)
            return True
        if not self._is_unchanged(look):
            return True
        if verdict is ChecksumResult.WRONG:
            self.wrong += 1
            _log.error("inode %#x %r: its bytes fail their checksum", ino, look.identity.name)
            pool.background.of(ino).device.submit(lambda: self._keep_aside(ino))
        else:
            self.unreadable += 1
        self._publishing.dismiss_lost(ino)
        return False

    def _is_unchanged(self, look: BlockToCompare) -> bool:
        """Whether the block of *look* is there, and was not written since."""
        pool, record = self._pool, self._pool.index.inode_or_miss(look.ino)
        opened = pool.open.inodes.get(look.ino)
        if record is None or (opened is not None and opened.writers):
            return False
        if look.ino in pool.durable.not_durable or not carries_identity(record):
            return False
        then = look.record
        return (record.size_bytes, record.mtime_ns) == (then.size_bytes, then.mtime_ns)

    def _keep_aside(self, ino: InodeNo) -> None:
        """Move the extent of *ino* into the quarantine, before it is unlinked; in any thread."""
        kept = False
        try:
            kept = self._quarantine.move_in(self._pool.extents, ino)
        except OSError as error:
            _log.warning("inode %#x is not kept for a look: %s", ino, error)
        self._look_at_quarantine()
        _log.error("inode %#x is %s", ino, "in quarantine" if kept else "removed")

    def _look_at_quarantine(self) -> None:
        """Note what is there; it is no reason to refuse a start."""
        try:
            self._quarantined = self._quarantine.held()
        except OSError as error:
            _log.warning("the quarantine cannot be read: %s", error)

    def _know(self, ino: InodeNo) -> None:
        self._known[ino] = None
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)

    # ---- the doubt, which RUN keeps until all are compared ----

    def end_doubt(self) -> None:
        """Note that all blocks were compared since the device may last have lost some."""
        self._pool.run.doubtful_below = NO_INODE
        if self._mode == "doubtful":
            self.below = NO_INODE

    def close(self) -> None:
        """End the doubt, because the pool stops, if all blocks in doubt are known to be right."""
        pool = self._pool
        if not pool.run.doubtful_below or pool.counters.blocks > _KNOWN_MAX:
            return
        for rows in pool.index.walk(INODE_PREFIX, _KNOWN_MAX):
            for ino, record in parse_inodes(rows):
                if pool.numbers.serial(ino) >= pool.run.doubtful_below or ino in self._known:
                    continue
                if record is None or stat.S_ISREG(record.mode):
                    return
        self.end_doubt()

    # ---- the scrub: all of them over time ----

    def run_due(self, now_s: float) -> None:
        """Go on with the scrub; it rests while clients store. Raises NoSpace, OSError."""
        if self._mode != "scrub":
            return
        found = self._scrub.pop_result()
        if found is not None:
            read, verdict, crc = found
            if verdict is ChecksumResult.UNKNOWN:
                self._give_checksum(read, crc)
            else:
                self.judge(read, verdict)
        pool = self._pool
        if pool.counters.sequence != self._seen or pool.open.inodes.written:
            self._seen, self._stored_s = pool.counters.sequence, now_s
        if self._scrub.busy or now_s < self._next_s or now_s - self._stored_s < 1.0:
            return
        look = self._next_look()
        if look is not None:
            self._next_s = now_s + look.identity.size_bytes / pool.settings.scrub_bytes_per_s
            self._scrub.start(lambda: (look, *self._read(look)))

    def _give_checksum(self, look: BlockToCompare, crc: int | None) -> None:
        """Give a checksum to a block that got none when it became durable. Raises NoSpace, OSError.

        The bytes just read are taken for right; from now on they can be compared.
        """
        # Atomic: if its identity is the same, nobody could write it since.
        if crc is None or not self._is_unchanged(look):
            return
        identity, device = look.identity, self._pool.background.of(look.ino).device
        summed = identity._replace(flags=identity.flags | HAS_CRC, content_crc=crc)
        device.submit(lambda: self._pool.extents.identify(look.ino, summed))
        self.given += 1

    def _next_look(self) -> BlockToCompare | None:
        """Return the next block to compare, None if the next rows have none."""
        rows = next(self._pool.index.walk(INODE_PREFIX, _ROWS, after=self._after), [])
        if not rows:
            if self._after:
                self.rounds += 1
                if self._whole:
                    self.end_doubt()
            self._after, self._whole = b"", True
        for ino, record in parse_inodes(rows):
            before, self._after = self._after, inode_key(ino)
            if record is not None:
                try:
                    look = self._to_compare(ino)
                except NotAtHand as lack:
                    self._after = before
                    self._pool.background.of(ino).asks.submit(lack.begin(), _call)
                    return None
                except (Damaged, OSError):
                    self._whole = False
                    continue  # its next open finds the damage
                if look is not None and not _gets_no_checksum(look.identity):
                    return look
        return None

    def describe(self) -> dict[str, Any]:
        """Return the figures `kvfs status` shows."""
        held = self._quarantined
        return {
            "verify": self._mode,
            "right": self.right,
            "wrong": self.wrong,
            "unreadable": self.unreadable,
            "rounds": self.rounds,
            "given": self.given,
            "doubtful": self._pool.run.doubtful_below > NO_INODE,
            "quarantined_blocks": len(held),
            "quarantined_bytes": sum(held.values()),
        }


def _gets_no_checksum(identity: Identity) -> bool:
    """Whether a block has holes and no checksum: it gets none (batch.py, final_bytes.py)."""
    return identity.flags & (HAS_HOLES | HAS_CRC) == HAS_HOLES


class VerifyProgress:
    """How far a comparison by command is."""

    def __init__(self) -> None:
        self.looked_at = self.blocks = self.bytes = 0
        self.without = self.wrong = 0

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""
        return {
            "looked_at": self.looked_at,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "without_checksum": self.without,
            "wrong": self.wrong,
        }


def _begun(verifier: Verifier, ino: InodeNo) -> Generator[None, None, BlockToCompare | None]:
    """Return what ``Verifier.begin`` does; yield while a thread reads the identity."""
    while True:
        try:
            return verifier.begin(ino)
        except NotAtHand as lack:
            reading: Aside[Callable[[], None]] = Aside("kvfs-identity")
            reading.start(lack.begin())
        while (follow := reading.pop_result()) is None:
            yield
        follow()


def verify_all(
    verifier: Verifier,
    inos: Iterator[InodeNo],
    progress: VerifyProgress,
    step: InodeNo,
    *,
    everything: bool,
) -> Iterator[None]:
    """Compare the blocks *inos*; yield while a thread reads, and at each *step* among them.

    If *everything*, these are all blocks, and no doubt is left at the end.
    """
    reading: Aside[ChecksumResult] = Aside("kvfs-verify")
    try:
        for ino in inos:
            if ino == step:
                yield
                continue
            progress.looked_at += 1
            try:
                look = yield from _begun(verifier, ino)
            except (Damaged, OSError) as error:
                _log.warning("inode %#x: %s", ino, error)
                look, everything = None, False
            if look is None:
                progress.without += 1
                continue
            reading.start(lambda look=look: verifier.read(look))  # type: ignore[misc]
            while (verdict := reading.pop_result()) is None:
                yield
            try:
                right = verifier.judge(look, verdict)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x: its name stays for now: %s", ino, error)
                right = False
            progress.blocks += 1
            progress.bytes += look.identity.size_bytes
            progress.wrong += not right
        if everything:
            verifier.end_doubt()
    finally:
        reading.join()


def _call(follow: Callable[[], None]) -> None:
    follow()
