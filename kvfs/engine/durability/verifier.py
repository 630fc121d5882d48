"""Compares blocks with their checksums: at their first open, by command, or all by and by.

The device's bytes are read in a thread, past the page cache. Other bytes than were stored are a
miss: the block loses its name, and its extent goes into the quarantine.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final, NamedTuple

from kvfs.core.errors import Damaged, KvfsError
from kvfs.core.records import HAS_CRC, INODE_PREFIX, Identity, inode_key, parse_inodes
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.publishing import Publishing
from kvfs.pool.identities import carries_identity
from kvfs.pool.pool import Pool
from kvfs.storage.background import Aside
from kvfs.storage.extent_checksum import device_crc, new_buffer
from kvfs.storage.quarantine import Quarantine

_log: Final = logging.getLogger(__name__)

#: Blocks known to be right, some 100 B each; one that is forgotten is compared again.
_KNOWN_MAX: Final = 65_536
#: Rows that the scrub reads at a time.
_ROWS: Final = 64


class Verdict(Enum):
    """What a look at a block's bytes found."""

    RIGHT = "right"
    WRONG = "wrong"
    UNREADABLE = "unreadable"
    #: It has no checksum, or is gone, or somebody writes it.
    UNKNOWN = "unknown"


class Look(NamedTuple):
    """A block whose bytes are to be compared with what its identity says."""

    ino: InodeNo
    identity: Identity


class Verifier:
    """The comparisons of one pool. Only ``read`` belongs to other threads."""

    def __init__(self, pool: Pool, publishing: Publishing, *, doubtful: bool) -> None:
        """*doubtful*: this start came after a power loss, or after bytes were lost."""
        settings = pool.settings
        self._pool = pool
        self._publishing = publishing
        self._mode = settings.verify
        always = settings.verify in ("open", "scrub")
        compares = always or (doubtful and settings.verify == "doubtful")
        #: Blocks with a lower number are compared at their first open.
        self.below = pool.numbers.first if compares else InodeNo(0)
        self._known: OrderedDict[InodeNo, None] = OrderedDict()
        self._quarantine = Quarantine(
            pool.device.pool_fd,
            pool.syscalls,
            settings.quarantine_files_max,
            settings.quarantine_bytes,
        )
        #: What is there, as of the last look: a status must not ask a device that is gone.
        self._quarantined: dict[InodeNo, int] = {}
        self._look_at_quarantine()
        self._local = threading.local()
        self._scrub: Aside[tuple[Look, Verdict]] = Aside("kvfs-scrub")
        self._after = b""
        self._next_s = self._stored_s = 0.0
        self._seen = pool.counters.sequence
        self.right = self.wrong = self.unreadable = self.rounds = 0
        pool.ends_first(self._scrub.join)

    def is_due(self, ino: InodeNo) -> bool:
        """Whether block *ino* must be compared before it is opened."""
        return ino < self.below and ino not in self._known

    def begin(self, ino: InodeNo) -> Look | None:
        """Return what to compare, None if that block has nothing to be compared with.

        Raises Damaged, and the name goes, if its identity cannot be read; NoSpace, OSError.
        """
        pool = self._pool
        record, opened = pool.index.inode_or_miss(ino), pool.open_inodes.get(ino)
        writes = opened is not None and opened.writers
        if record is None or writes or ino in pool.not_durable or not carries_identity(record):
            self._know(ino)
            return None
        try:
            identity = pool.extents.identity(ino)
        except Damaged:  # nothing says any more what the block is; the next lookup is a miss
            self._publishing.dismiss_lost(ino)
            raise
        if identity is None or not identity.flags & HAS_CRC:
            self._know(ino)
            return None
        return Look(ino, identity)

    def read(self, look: Look) -> Verdict:
        """Compare in a thread; it reads the whole block from the device."""
        pool = self._pool
        if not hasattr(self._local, "buffer"):
            self._local.buffer = new_buffer()
        try:
            fd = self._open(look.ino)
        except Damaged:
            return Verdict.UNREADABLE
        try:
            crc = device_crc(pool.syscalls, fd, look.identity.size_bytes, self._local.buffer)
        except OSError as error:
            _log.error("inode %#x cannot be read: %s", look.ino, error)
            return Verdict.UNREADABLE
        finally:
            pool.syscalls.close(fd)
        return Verdict.RIGHT if crc == look.identity.content_crc else Verdict.WRONG

    def _open(self, ino: InodeNo) -> int:
        try:
            return self._pool.extents.open(ino, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # tmpfs has no O_DIRECT everywhere
            return self._pool.extents.open(ino, os.O_RDONLY)

    def judge(self, look: Look, verdict: Verdict) -> bool:
        """Act on what was found; whether the block may be opened. Raises NoSpace, OSError."""
        pool, ino = self._pool, look.ino
        # Atomic: the block may have been written, or be gone, since the comparison began.
        if verdict is Verdict.RIGHT:
            self.right += 1
            self._know(ino)
            return True
        try:
            present = pool.extents.identity(ino)
        except Damaged:
            present = None
        if present != look.identity or pool.index.inode_or_miss(ino) is None:
            return True
        if verdict is Verdict.WRONG:
            self.wrong += 1
            _log.error("inode %#x %r: its bytes fail their checksum", ino, look.identity.name)
            kept = self._keep_aside(ino)
            _log.error("inode %#x is %s", ino, "in quarantine" if kept else "removed")
        else:
            self.unreadable += 1
        self._publishing.dismiss_lost(ino)
        return False

    def _keep_aside(self, ino: InodeNo) -> bool:
        try:
            kept = self._quarantine.take(self._pool.extents, ino)
        except OSError as error:
            _log.warning("inode %#x is not kept for a look: %s", ino, error)
            return False
        self._look_at_quarantine()
        return kept

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

    # ---- all of them, by and by ----

    def tick(self, now_s: float) -> None:
        """Go on with the scrub; it rests while clients store. Raises NoSpace, OSError."""
        if self._mode != "scrub":
            return
        found = self._scrub.take()
        if found is not None:
            self.judge(*found)
        pool = self._pool
        if pool.counters.sequence != self._seen or pool.open_inodes.written:
            self._seen, self._stored_s = pool.counters.sequence, now_s
        if self._scrub.busy or now_s < self._next_s or now_s - self._stored_s < 1.0:
            return
        look = self._next_look()
        if look is not None:
            self._next_s = now_s + look.identity.size_bytes / pool.settings.scrub_bytes_per_s
            self._scrub.start(lambda: (look, self.read(look)))

    def _next_look(self) -> Look | None:
        """Return the next block with a checksum, None if these rows have none."""
        rows = next(self._pool.index.walk(INODE_PREFIX, _ROWS, after=self._after), [])
        if not rows:
            self.rounds += bool(self._after)
            self._after = b""
        for ino, record in parse_inodes(rows):
            self._after = inode_key(ino)
            if record is not None:
                try:
                    look = self.begin(ino)
                except (Damaged, OSError):
                    continue  # its next open shows that
                if look is not None:
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
            "quarantined_blocks": len(held),
            "quarantined_bytes": sum(held.values()),
        }


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


def verify_all(
    verifier: Verifier, inos: Iterator[InodeNo], progress: VerifyProgress, step: InodeNo
) -> Iterator[None]:
    """Compare the blocks *inos*, *step* among them for a pause; yield while a thread reads."""
    reading: Aside[Verdict] = Aside("kvfs-verify")
    try:
        for ino in inos:
            if ino == step:
                yield
                continue
            progress.looked_at += 1
            try:
                look = verifier.begin(ino)
            except (Damaged, OSError) as error:
                _log.warning("inode %#x: %s", ino, error)
                look = None
            if look is None:
                progress.without += 1
                continue
            reading.start(lambda look=look: verifier.read(look))  # type: ignore[misc]
            while (verdict := reading.take()) is None:
                yield
            try:
                right = verifier.judge(look, verdict)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x: its name stays for now: %s", ino, error)
                right = False
            progress.blocks += 1
            progress.bytes += look.identity.size_bytes
            progress.wrong += not right
    finally:
        reading.join()
