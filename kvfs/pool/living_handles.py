"""Handles that clients still have when a server takes over a mount, read from the handle table.

The table itself belongs to the mount (mount/files/handles.py).
"""

from collections.abc import Collection
from typing import NamedTuple

from kvfs.core.types import InodeNo
from kvfs.machine.processes import NOBODY, Maker


class LivingHandle(NamedTuple):
    """One handle, which *opens* opens of the kernel share."""

    ino: InodeNo
    writer: bool
    opens: int = 1
    #: Whether a file server has it, and whether it is on passthrough.
    served: bool = False
    passing: bool = False
    # ---- of a writer's handle ----
    appends: bool = False
    #: The thread that opened it, and its process.
    thread: int = 0
    maker: Maker = NOBODY
    #: Whether it was closed (FLUSH), and what size and mtime (ns) the extent had then.
    flushed: bool = False
    flushed_as: tuple[int, int] = (-1, 0)


class Living(NamedTuple):
    """All living handles."""

    handles: Collection[LivingHandle]

    def by_inode(self) -> dict[InodeNo, list[LivingHandle]]:
        """Return the handles of each inode."""
        found: dict[InodeNo, list[LivingHandle]] = {}
        for handle in self.handles:
            found.setdefault(handle.ino, []).append(handle)
        return found

    def written(self) -> set[InodeNo]:
        """Return the inodes that have a writer."""
        return {handle.ino for handle in self.handles if handle.writer}
