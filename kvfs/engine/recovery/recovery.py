"""Bring a pool's index up after whatever happened to it.

Three cases (docs/durability.md): stopped cleanly: believe the index. Not stopped, but the same
boot: the page cache kept every commit; finish what was left open. Another boot, or a file system
that was cut off: the unsynced index may be in any state; rebuild it from the identities.
"""

import contextlib
import logging
import stat
from collections.abc import Iterator
from typing import Final

from kvfs.core.errors import Damaged, FormatUnknown, IndexDamaged, NoSpace, SourceFull
from kvfs.core.records import INODE_PREFIX, inode_key
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import Device
from kvfs.engine.recovery.finish_drafts import finish_index
from kvfs.engine.recovery.index_compaction import compact_index
from kvfs.engine.recovery.index_probe import INODE_ROWS, START_ROWS, refuse_unreadable
from kvfs.engine.recovery.rebuild import rebuild_index
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.index_swap import index_path, settle_index
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.run_state import read_run_state
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)


def recover(device: Device, settings: Settings, syscalls: Syscalls) -> bool:
    """Leave an index behind whose every block is whole; return whether a sweep is due.

    An index that should be good and is not leaves the device untouched. Raises IndexDamaged,
    FormatUnknown, SourceFull, OSError.
    """
    state = read_run_state(device.pool_fd, syscalls, device.superblock)
    with _errors_named(device):
        if settings.read_only:
            if not state.clean:
                raise IndexDamaged("not stopped cleanly, so mount it writable once")
            _look(device, settings, syscalls)
            return False
        if state.trusted:
            listed = _look(device, settings, syscalls)
            if not state.clean and not listed:
                refuse_unreadable(device.pool_fd, INODE_ROWS)
            settle_index(device.pool_fd, syscalls)
            if not state.clean:
                _finish(device, settings, syscalls)
            compact_index(device.pool_fd, syscalls)
        else:
            _log.warning("%s: cut off before it could stop; its index is rebuilt", device.source)
            _rebuild(device, settings, syscalls)
    return state.strays or not state.clean


def _look(device: Device, settings: Settings, syscalls: Syscalls) -> bool:
    """Raise unless the index opens and has its root; nothing is written.

    Return whether it lists what is unfinished.
    """
    numbers = InodeNumbers(device.pool_fd, syscalls, read_only=True)
    numbers.close()
    refuse_unreadable(device.pool_fd, START_ROWS)
    path = index_path(device.pool_fd)
    with Index(
        path, map_size_bytes=settings.index_map_bytes, read_only=True, syscalls=syscalls
    ) as index:
        index.counters()
        root = index.inode(ROOT_INODE)
        if root is None or not stat.S_ISDIR(root.mode):
            raise IndexDamaged("index: it has no root directory")
        # Of another pool, or older than the index: what it gives out is in use.
        last = inode_key(InodeNo(numbers.first - 1))
        if any(index.walk(INODE_PREFIX, 1, after=last)):
            raise IndexDamaged(f"INODES: not behind {numbers.first:#x}, which the index knows")
        return index.unfinished() is not None


def _finish(device: Device, settings: Settings, syscalls: Syscalls) -> None:
    with (
        Index(
            index_path(device.pool_fd),
            map_size_bytes=settings.index_map_bytes,
            preallocate_bytes=settings.index_preallocate_bytes,
            syscalls=syscalls,
        ) as index,
        contextlib.closing(Extents(device.pool_fd, syscalls, device.fs_type)) as extents,
    ):
        finished = finish_index(index, extents)
    _log.warning(
        "%s: not stopped cleanly; %d drafts dropped, %d rewritten blocks measured",
        device.source,
        finished.dropped,
        finished.measured,
    )


def _rebuild(device: Device, settings: Settings, syscalls: Syscalls) -> None:
    with contextlib.closing(Extents(device.pool_fd, syscalls, device.fs_type)) as extents:
        rebuild_index(device.pool_fd, extents, settings, syscalls)


@contextlib.contextmanager
def _errors_named(device: Device) -> Iterator[None]:
    """Say which pool it is, and what the operator can do."""
    try:
        yield
    except (IndexDamaged, Damaged) as error:
        hint = f"kvfs fsck --repair {device.source} rebuilds it"
        raise IndexDamaged(f"{device.source}: {error}; {hint}") from error
    except FormatUnknown as error:
        raise FormatUnknown(f"{device.source}: {error}") from error
    except NoSpace as error:
        raise SourceFull(f"{device.source}: no room for the index: {error}") from error
