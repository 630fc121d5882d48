"""Pins by command (`kvfs pin`, `kvfs unpin`): those of paths, a pattern or all, in small steps.

Requests are answered between two steps, and each pin is one index transaction.
"""

import contextlib
import stat
from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import CommandError, KvfsError, NoSuchAttribute, NotPermitted
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.named import STEP, Named, named
from kvfs.engine.store import Store

#: Pins set or removed in one step; some 60 us each.
_AT_ONCE: Final = 32
#: Why something was left as it was.
_BEYOND: Final = "beyond pin_share"
_PINNED: Final = "pinned already"
_UNPINNED: Final = "not pinned"


class PinProgress:
    """The progress of a command. ``kept`` and ``kept_bytes`` count what was left as is."""

    def __init__(self) -> None:
        self.looked_at = 0
        self.files = 0
        self.directories = 0
        self.others = 0
        self.bytes = 0
        self.kept: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""
        return {**vars(self), "kept": dict(self.kept), "kept_bytes": dict(self.kept_bytes)}

    def changed(self, record: InodeRecord, size_bytes: int) -> None:
        """Count what was pinned or unpinned."""
        if stat.S_ISDIR(record.mode):
            self.directories += 1
        elif stat.S_ISREG(record.mode):
            self.files += 1
        else:
            self.others += 1
        self.bytes += size_bytes

    def keep(self, why: str, size_bytes: int) -> None:
        """Count what was left as it was."""
        self.kept[why] += 1
        self.kept_bytes[why] += size_bytes


def pin(store: Store, ino: InodeNo) -> None:
    """Pin *ino*. Raises NotPermitted beyond the limit of pins, KvfsError."""
    store.attributes.set_xattr(ino, PIN, b"1")


def unpin(store: Store, ino: InodeNo, *, all_pins: bool = False) -> bool:
    """Remove the pin of *ino*, or make it an exception to that of a directory above.

    Return whether that changed anything. When *all_pins* go, nothing becomes an exception.
    """
    attributes = store.attributes
    before = ino in store.pool.pins
    with contextlib.suppress(NoSuchAttribute):
        attributes.remove_xattr(ino, PIN)
    if all_pins or attributes.xattr(ino, PIN) != b"1":
        return before
    attributes.set_xattr(ino, PIN, b"0")
    return True


def pin_matching(store: Store, what: Named, progress: PinProgress) -> Iterator[None]:
    """Pin all that *what* names, a step at a time. Raises PathMissing, UsageError."""
    for ino, record in _in_steps(store, what, progress):
        if record is None:
            yield
            continue
        held = store.pool.pins.held_bytes(ino)
        if held is not None:
            progress.keep(_PINNED, held)
            continue
        try:
            pin(store, ino)
        except CommandError:
            raise
        except NotPermitted:
            progress.keep(_BEYOND, record.allocated_bytes)
        except KvfsError as error:
            progress.keep(type(error).__name__, record.allocated_bytes)
        else:
            progress.changed(record, store.pool.pins.held_bytes(ino) or 0)


def unpin_matching(store: Store, what: Named, progress: PinProgress) -> Iterator[None]:
    """Unpin all that *what* names, a step at a time. Raises PathMissing, UsageError."""
    for ino, record in _in_steps(store, what, progress):
        if record is None:
            yield
        else:
            _unpin_one(store, ino, record, progress)


def unpin_all(store: Store, progress: PinProgress) -> Iterator[None]:
    """Remove every pin that is an attribute, a step at a time."""
    for count, (ino, _) in enumerate(store.pool.pins.rows(), 1):
        record = store.pool.index.inode_or_miss(ino)
        if record is not None:
            progress.looked_at += 1
            _unpin_one(store, ino, record, progress, all_pins=True)
        if count % _AT_ONCE == 0:
            yield


def _unpin_one(
    store: Store,
    ino: InodeNo,
    record: InodeRecord,
    progress: PinProgress,
    *,
    all_pins: bool = False,
) -> None:
    held = store.pool.pins.held_bytes(ino)
    if not unpin(store, ino, all_pins=all_pins):
        progress.keep(_UNPINNED, record.allocated_bytes)
        return
    progress.changed(record, record.allocated_bytes if held is None else held)


def _in_steps(
    store: Store, what: Named, progress: PinProgress
) -> Iterator[tuple[InodeNo, InodeRecord | None]]:
    """Yield each inode that *what* names with its record, and no record at the end of a step."""
    since = 0
    for ino in named(store.pool, store.namespace, what):
        if ino == STEP or since == _AT_ONCE:
            yield STEP, None
            since = 0
        record = None if ino == STEP else store.pool.index.inode_or_miss(ino)
        if record is not None:
            progress.looked_at += 1
            since += 1
            yield ino, record
