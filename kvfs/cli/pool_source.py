"""SOURCE for verbs that want a pool and make none: what it is instead, and nothing about mkfs."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.core.errors import SourceBlank, SourceForeign
from kvfs.machine.mount_table import kvfs_at, resolve_mountpoint


@contextmanager
def wanted_pool(source: str) -> Iterator[None]:
    """Say of a *source* that is no pool what it is. Raises SourceForeign, SourceBlank.

    A mountpoint is told from the mount table alone: its server may hang.
    """
    mount = kvfs_at(resolve_mountpoint(source))
    if mount is not None:
        raise SourceForeign(
            f"{source} is no pool: it is where one is mounted; give its source, {mount.source}"
        )
    try:
        yield
    except (SourceBlank, SourceForeign) as error:
        raise type(error)(error.found) from None
