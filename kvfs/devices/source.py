"""SOURCE as the operator gives it: which kind it is, and a function for each verb.

The three kinds are block.py, image.py and directory.py.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvfs.core.encryption import Encryption
from kvfs.core.errors import (
    CommandError,
    UsageError,
)
from kvfs.core.setting_values import refuse_control_characters
from kvfs.core.sizes import format_size
from kvfs.core.source_list import is_by_uuid, listed, sources_of
from kvfs.core.types import CAPACITY_MIN_BYTES, FIRST_DRIVE
from kvfs.devices import block, busy, directory, dm_crypt, image, probe
from kvfs.devices.by_uuid import located
from kvfs.devices.device import DirectoryReserve, Fill, SourceKind
from kvfs.devices.pool_drives import (
    others_of,
    refuse_part,
    refuse_twice,
    refuse_unlike,
)
from kvfs.devices.pool_files import PoolHeader, new_headers
from kvfs.devices.released import kind_to_be, recognise, refuse_busy, wait_released
from kvfs.devices.unlocked import (
    forget_key,
    locked,
    mapping_of,
    require_encryptable,
    told_as,
)

#: What a directory source leaves to others, if nothing else is said.
RESERVE: Final = DirectoryReserve()
_HEADERS: Final[Mapping[SourceKind, Callable[[str], PoolHeader | None]]] = {
    "block": block.header_of,
    "image": image.header_of,
    "directory": directory.header_of,
}


class _Wish(NamedTuple):
    """What a source is to become: a drive of the size and with the content that mkfs was told."""

    source: str
    kind: SourceKind
    header: PoolHeader
    size_bytes: int | None
    force: bool
    fill: Fill
    reserve: DirectoryReserve
    encryption: Encryption | None

    def refuse(self) -> None:
        """Raise what keeps it from being made; nothing is written."""
        source, force, capacity_bytes = self.source, self.force, self.header.capacity_bytes
        if (mapping := mapping_of(source, self.kind)) is not None:
            with told_as(source, mapping):
                busy.refuse_busy(mapping.path)
            probe.refuse_content(source, probe.find_content(mapping.path), force=force)
        elif self.kind == "block":
            block.require_formattable(
                source, capacity_bytes=capacity_bytes, force=force, encryption=self.encryption
            )
        elif self.kind == "image":
            image.require_formattable(
                source,
                size_bytes=self.size_bytes,
                capacity_bytes=capacity_bytes,
                force=force,
                encryption=self.encryption,
            )
        else:
            directory.require_formattable(
                source, capacity_bytes=capacity_bytes, force=force, reserve=self.reserve
            )

    def make(self) -> PoolHeader:
        """Make the drive; the source is free again on return. Raises what ``refuse`` raises."""
        source, header, fill, force = self.source, self.header, self.fill, self.force
        if self.force or mapping_of(source, self.kind) is not None:
            self.refuse()
            _forget_encryption(source, self.kind)
        if self.kind == "block":
            header = block.format_block(
                source, header, force=force, fill=fill, encryption=self.encryption
            )
        elif self.kind == "image":
            header = image.format_image(
                source,
                header,
                size_bytes=self.size_bytes,
                force=force,
                fill=fill,
                encryption=self.encryption,
            )
        else:
            header = directory.format_directory(
                source, header, force=force, fill=fill, reserve=self.reserve
            )
        wait_released(source)
        return header


def format_source(
    source: str,
    *,
    fill: Fill,
    size_bytes: int | None = None,
    capacity_bytes: int | None = None,
    force: bool = False,
    reserve: DirectoryReserve = RESERVE,
    encryption: Encryption | None = None,
) -> PoolHeader:
    """Make a pool of *source*, which may list several drives; return the header of the first.

    Raises what format_drives raises.
    """
    headers = format_drives(
        sources_of(source),
        fill=fill,
        size_bytes=size_bytes,
        capacity_bytes=capacity_bytes,
        force=force,
        reserve=reserve,
        encryption=encryption,
    )
    return headers[FIRST_DRIVE]


def format_drives(
    sources: Sequence[str],
    *,
    fill: Fill,
    size_bytes: int | None = None,
    capacity_bytes: int | None = None,
    force: bool = False,
    reserve: DirectoryReserve = RESERVE,
    encryption: Encryption | None = None,
) -> list[PoolHeader]:
    """Make one pool of *sources*; *fill* writes index and inode numbers into each new directory.

    A path that does not exist becomes an image file, of *size_bytes* or as large as its part of
    *capacity_bytes* of blocks needs: each drive has the same part. Nothing is written before all
    checks of all sources have passed; POOL is written last. What was made is removed again if
    another one fails. The sources are free again on return. Raises SourceMissing, SourceForeign
    (unless *force*), SourceBusy, SourceFull, SourceDamaged, UsageError, ToolMissing, NotRoot,
    KeyUnusable.
    """
    part_bytes = None if capacity_bytes is None else capacity_bytes // len(sources)
    may_create = not (size_bytes is None and part_bytes is None)
    kinds = [kind_to_be(source, may_create=may_create) for source in sources]
    for source, kind in zip(sources, kinds, strict=True):
        _refuse_request(source, kind, size_bytes, part_bytes)
        require_encryptable(source, kind, encryption)
    if len(sources) > 1:
        refuse_unlike(sources, kinds)
    headers = new_headers([part_bytes] * len(sources))
    wishes = [
        _Wish(source, kind, header, size_bytes, force, fill, reserve, encryption)
        for source, kind, header in zip(sources, kinds, headers, strict=True)
    ]
    if len(wishes) == 1:
        return [wishes[FIRST_DRIVE].make()]
    for wish in wishes:
        wish.refuse()
    with contextlib.ExitStack() as undo:
        made = []
        for wish in wishes:
            removes = wish.kind == "image" and not os.path.exists(wish.source)
            made.append(wish.make())
            undo.callback(unmake_drive, wish.source, removes=removes)
        undo.pop_all()
    return made


def format_one_more(
    source: str,
    beside: Sequence[str],
    header: PoolHeader,
    *,
    fill: Fill,
    force: bool = False,
    reserve: DirectoryReserve = RESERVE,
    encryption: Encryption | None = None,
) -> None:
    """Make *source* a drive with *header*, for a pool that has the sources *beside*.

    *encryption* is that of the others, whose key it has to be. Nothing is written before all checks
    have passed. Raises what format_drives raises.
    """
    kind = kind_to_be(source, may_create=False)
    _refuse_request(source, kind, None, None)
    require_encryptable(source, kind, encryption)
    sources = [*beside, source]
    refuse_twice(sources)
    refuse_unlike(sources, [*map(recognise, beside), kind])
    if encryption is not None:
        for each in beside:
            dm_crypt.require_opens(each, encryption)
    elif any(mapping_of(each, recognise(each)) for each in beside):
        raise UsageError(f"{source} cannot be added: the pool is encrypted, and it would not be")
    _Wish(source, kind, header, None, force, fill, reserve, encryption).make()


def _refuse_request(
    source: str, kind: SourceKind, size_bytes: int | None, capacity_bytes: int | None
) -> None:
    """Raise UsageError for what no source of this kind can be made."""
    if capacity_bytes is not None and capacity_bytes < CAPACITY_MIN_BYTES:
        raise UsageError(
            f"{source}: a capacity of {format_size(capacity_bytes)} is too small; a pool needs "
            f"{format_size(CAPACITY_MIN_BYTES)}"
        )
    try:
        refuse_control_characters(os.path.abspath(source))  # kvfs mount would refuse it
    except ValueError as error:
        raise UsageError(f"SOURCE: {error}") from None
    if size_bytes is not None and kind != "image":
        raise UsageError(f"{source} is a {kind}; only an image file can be given a size")


def unmake_drive(source: str, *, removes: bool = False) -> None:
    """Make a drive blank again that was just made, and is none; *removes*: its image, too."""
    with contextlib.suppress(CommandError):
        _destroy(source)
    if removes:
        with contextlib.suppress(OSError):
            os.unlink(source)


def destroy_source(source: str) -> None:
    """Make *source*, a pool that is not in use, blank again. Raises what open_source raises.

    *source* lists all drives of a pool of several, or is its UUID, by which all are found. In a
    directory only the pool's files are removed; of a block device or image the key is erased, if it
    is encrypted, and the first and last 4 MiB are zeroed. The sources are free again on return.
    Raises UsageError, with all unchanged, if they are not all drives of one pool.
    """
    named = sources_of(source)
    sources = located(named)
    refuse_twice(sources)
    headers = [_header_of(each) for each in sources]
    if any(map(is_by_uuid, named)):
        others = _others_of(source, headers)
        sources, headers = (*sources, *others), [*headers, *map(_header_of, others)]
    refuse_part(sources, headers)
    # A look at an image attaches a loop device, which ends a moment later.
    wait_released(listed(sources))
    for each in sources:
        _destroy(each)


def _others_of(source: str, headers: Sequence[PoolHeader | None]) -> list[str]:
    """Return where the other drives of the pool *source* are; those not found are left out.

    *headers* are those of the drives that are known. Raises UsageError if none can be read.
    """
    known = [header for header in headers if header]
    if not known:
        raise UsageError(
            f"{source}: which drives its pool has is not known, since its header is damaged, or "
            "encrypted: name the device of each"
        )
    return [at for at in others_of(known).values() if at]


def _header_of(source: str) -> PoolHeader | None:
    """Return the header of the drive in *source*; None if it is damaged, or locked."""
    kind = recognise(source)
    if (mapping := mapping_of(source, kind)) is not None:
        with told_as(source, mapping):
            return block.header_of(mapping.path)
    if locked(source, kind) is not None:
        refuse_busy(source, kind)
        return None
    return _HEADERS[kind](source)


def _forget_encryption(source: str, kind: SourceKind) -> bool:
    """Erase the key of *source*, if kvfs has encrypted it, and make it blank; else return False."""
    if not os.path.exists(source):
        return False
    if (mapping := mapping_of(source, kind)) is not None:
        dm_crypt.close(source, mapping)
        wait_released(source)
    lock = locked(source, kind)
    if lock is not None:
        forget_key(source, kind, lock)
    return lock is not None


def _destroy(source: str) -> None:
    kind = recognise(source)
    if _forget_encryption(source, kind):
        wait_released(source)
        return
    if kind == "block":
        block.destroy_block(source)
    elif kind == "image":
        image.destroy_image(source)
    else:
        directory.destroy_directory(source)
    wait_released(source)
