"""A block device as a source: how a pool on it is made, opened and destroyed."""

import contextlib
import os

from kvfs.core.encryption import Encryption, header_bytes
from kvfs.core.errors import (
    SourceBlank,
    SourceDamaged,
    SourceForeign,
    SourceFull,
    UsageError,
)
from kvfs.core.sizes import format_size
from kvfs.devices import busy, dm_crypt, loop, probe, xfs
from kvfs.devices.busy import outlived
from kvfs.devices.device import XFS_MIN_BYTES, Device, Fill, SourceKind, xfs_usable_bytes
from kvfs.devices.pool_files import PoolHeader


def require_formattable(
    path: str, *, capacity_bytes: int | None, force: bool, encryption: Encryption | None = None
) -> None:
    """Raise what keeps block device *path* from being made a drive of a pool.

    That is SourceBusy, SourceForeign (unless *force*), SourceFull, UsageError, SourceDamaged,
    ToolMissing.
    """
    busy.refuse_busy(path)
    probe.refuse_content(path, probe.find_content(path), force=force)
    refuse_size(path, probe.size_bytes_of(path) - header_bytes(encryption), capacity_bytes)


def format_block(
    path: str,
    header: PoolHeader,
    *,
    force: bool,
    fill: Fill,
    encryption: Encryption | None = None,
) -> PoolHeader:
    """Make a pool with *header* on block device *path*, after every check has passed.

    Raises what require_formattable raises, and what dm_crypt.make_pool raises.
    """
    require_formattable(
        path, capacity_bytes=header.capacity_bytes, force=force, encryption=encryption
    )
    if encryption is not None:
        return dm_crypt.make_pool(path, path, fill, header, encryption)
    return xfs.make_pool(path, path, fill, header, discard=not loop.is_loop(path))


def open_block(
    path: str, *, read_only: bool, source: str = "", kind: SourceKind = "block"
) -> Device:
    """Open the pool on block device *path*, which may be the mapping over a *source* of *kind*.

    Raises SourceBlank, SourceForeign, FormatUnknown, SourceBusy, SourceDamaged, UsageError,
    ToolMissing, NotRoot; in that case the device is unchanged.
    """
    source = source or path
    with outlived(path) as found:
        if found is not None:
            require_pool(path, source)
            return xfs.join_pool(found, path, source, kind, read_only=read_only)
    busy.refuse_busy(path)
    require_pool(path, source)
    header = xfs.look_at_pool(path, source)
    return xfs.open_pool(path, source, kind, header, read_only=read_only)


def outlives(path: str) -> bool:
    """Whether a file system on *path* outlived its server. Raises SourceDamaged."""
    with outlived(path) as found:
        return found is not None


def header_of(path: str) -> PoolHeader | None:
    """Return the header of the pool on block device *path*. Raises what open_block raises.

    None: its XFS cannot be mounted.
    """
    busy.refuse_busy(path)
    require_pool(path)
    return known_header(path, path)


def destroy_block(path: str) -> None:
    """Make block device *path*, which holds a pool, blank again. Raises what open_block raises."""
    header_of(path)
    blank_block(path)


def blank_block(path: str) -> None:
    """Make block device *path* blank, whatever it holds. Raises SourceBusy, SourceDamaged."""
    fd = busy.claim(path, os.O_RDWR)
    try:
        probe.zero_edges(fd)
    except OSError as error:
        raise SourceDamaged(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)


def require_pool(path: str, source: str = "") -> None:
    """Raise SourceBlank or SourceForeign unless the device or image at *path* holds a pool.

    *source* is its name in messages.
    """
    source = source or path
    content = probe.find_content(path)
    if content is None:
        raise SourceBlank(
            f"{source} is not a kvfs pool: it is blank", f"kvfs mkfs {source} makes a pool of it"
        )
    if not content.is_pool:
        raise SourceForeign(
            f"{source} is not a kvfs pool: {content.text}", "kvfs mkfs --force overwrites it"
        )


def known_header(block_path: str, source: str) -> PoolHeader | None:
    """Return the header of the pool; None if its XFS cannot be mounted.

    Such a pool may still be destroyed. Raises SourceForeign or FormatUnknown if the XFS has a
    pool's label but no pool we know.
    """
    with contextlib.suppress(SourceDamaged):
        return xfs.look_at_pool(block_path, source)
    return None


def refuse_size(path: str, size_bytes: int, capacity_bytes: int | None) -> None:
    """Raise SourceFull for a device too small for XFS, UsageError for a capacity beyond it."""
    if size_bytes < XFS_MIN_BYTES:
        raise SourceFull(
            f"{path} has {format_size(size_bytes)}; a pool needs {format_size(XFS_MIN_BYTES)}"
        )
    most_bytes = xfs_usable_bytes(size_bytes)
    if capacity_bytes is not None and capacity_bytes > most_bytes:
        raise UsageError(
            f"{path} can hold at most {format_size(most_bytes)} of blocks, not "
            f"{format_size(capacity_bytes)}"
        )
