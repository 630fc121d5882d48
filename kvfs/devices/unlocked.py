"""An encrypted SOURCE as a plain one: the mapping over its drive or image, opened if need be."""

import contextlib
import os
from collections.abc import Iterator

from kvfs.core.encryption import Encryption, Lock, Way
from kvfs.core.errors import CommandError, KeyUnusable, SourceBlank, SourceBusy, UsageError
from kvfs.devices import block, busy, dm_crypt, image, loop, probe
from kvfs.devices.device import SourceKind
from kvfs.devices.mapped import Mapping, lock_on, mapping_over
from kvfs.devices.xfs import LeftMeanwhile
from kvfs.machine.mount_table import where_in_use


def require_encryptable(source: str, kind: SourceKind, encryption: Encryption | None) -> None:
    """Raise UsageError, ToolMissing or KeyUnusable if *source* cannot be encrypted so here."""
    if encryption is None:
        return
    if kind == "directory":
        raise UsageError(
            f"{source} is a directory, which kvfs does not encrypt: use fscrypt on ext4, or a "
            "dm-crypt below its file system"
        )
    dm_crypt.require_means(source, encryption)


def mapping_of(source: str, kind: SourceKind) -> Mapping | None:
    """Return the mapping that is open over *source*; None if none is. Raises OSError."""
    if kind == "block":
        return mapping_over(source)
    if kind == "directory" or not os.path.exists(source):
        return None
    try:
        image_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # who opens the image says why
        return None
    try:
        users = list(loop.users_of(image_fd))
    finally:
        os.close(image_fd)
    return next((found for user in users if (found := mapping_over(user))), None)


@contextlib.contextmanager
def unlocked(
    source: str, kind: SourceKind, encryption: Encryption | None
) -> Iterator[Mapping | None]:
    """Yield the open mapping over the pool in *source*; None if it is blank, or not encrypted.

    A mapping whose key can be had again closes itself after its last user: who opens the pool in
    the ``with`` is one. Raises SourceBlank if the key is gone and *encryption* asks for another;
    KeyUnusable, UsageError, LeftMeanwhile, and what locks an image or a device.
    """
    mapping = mapping_of(source, kind)
    if mapping is not None:
        _refuse_other_way(source, mapping.way, encryption)
        with _still_open(source, kind, mapping), told_as(source, mapping):
            yield mapping
        if mapping.way is not Way.EPHEMERAL:  # who opened it may have been killed before
            dm_crypt.close_after_use(mapping.name)
        return
    lock = lock_on(source)
    if lock is None:
        content = probe.find_content(source) if encryption is not None else None
        if content is not None and content.is_pool:
            _refuse_other_way(source, None, encryption)
        yield None
        return
    _refuse_other_way(source, lock.way, encryption)
    if lock.way is Way.EPHEMERAL:
        raise _key_is_gone(source, encryption)
    with contextlib.ExitStack() as stack:
        try:
            block_path = stack.enter_context(_as_block(source, kind))
        except SourceBusy as error:  # its mapping closes itself just now
            raise LeftMeanwhile(error.found) from error
        stack.callback(dm_crypt.close_after_use, lock.mapping)
        dm_crypt.open_luks(block_path, source, lock, encryption)
        yield mapping_over(block_path)


def _key_is_gone(source: str, encryption: Encryption | None) -> CommandError:
    what = f"the key of the pool in {source} went with the last boot"
    if encryption is None:
        return KeyUnusable(what, "kvfs mount --encrypt=ephemeral makes it anew, empty")
    return SourceBlank(what, "kvfs mount makes it anew, empty")


def _refuse_other_way(source: str, way: Way | None, encryption: Encryption | None) -> None:
    """Raise UsageError if *source* is encrypted in another *way* than was asked for."""
    if encryption is not None and encryption.way is not way:
        found = "not encrypted" if way is None else f"encrypted with {way}"
        raise UsageError(
            f"{source} is a pool that is {found}, and {encryption.way} was asked for: "
            "kvfs mkfs --force makes it anew"
        )


@contextlib.contextmanager
def told_as(source: str, mapping: Mapping) -> Iterator[None]:
    """Inside the ``with``, have SourceBusy name *source*, and not its *mapping*."""
    try:
        yield
    except SourceBusy as error:
        if mapping.path not in error.found:
            raise
        where = where_in_use(source)
        mounted = f"{source} is in use: the pool in it is mounted {where}"
        told = mounted if where else error.found.replace(mapping.path, source)
        raise SourceBusy(told) from error


@contextlib.contextmanager
def _still_open(source: str, kind: SourceKind, mapping: Mapping) -> Iterator[None]:
    """Turn what fails since *mapping* has closed itself meanwhile into LeftMeanwhile."""
    try:
        yield
    except (OSError, CommandError) as error:
        if mapping.way is not Way.EPHEMERAL and mapping_of(source, kind) is None:
            raise LeftMeanwhile(f"{source} was in use until just now; try again") from error
        raise


@contextlib.contextmanager
def _as_block(source: str, kind: SourceKind) -> Iterator[str]:
    if kind == "image":
        with image.image_as_block(source) as block_path:
            yield block_path
        return
    busy.refuse_busy(source)
    yield source


def locked(source: str, kind: SourceKind) -> Lock | None:
    """Return how a drive or image is encrypted by kvfs whose mapping is not open; else None."""
    return None if kind == "directory" else lock_on(source)


def forget_key(source: str, kind: SourceKind, lock: Lock) -> None:
    """Erase the key of *source*, whose mapping is closed, and make it blank.

    Raises what locks an image or a device, SourceDamaged, ToolMissing.
    """
    if lock.way is not Way.EPHEMERAL:
        dm_crypt.erase_keys(source)
    if kind == "image":
        image.blank_image(source)
    else:
        block.blank_block(source)
