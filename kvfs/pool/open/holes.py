"""How much a write may allocate in an extent with holes.

Most extents, with their reserve, have all blocks from offset 0 on. For them the allocated bytes
tell what a write will allocate, and no system call is needed. In an extent with holes a write may
also allocate before the last block. It has no block beyond ``reach_bytes``, so the holes are no
larger than what is missing up to there. The file system knows what is written, but it reports
reserved blocks as holes.
"""

import os

from kvfs.core.types import round_up
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.storage.syscalls import Syscalls


def look(opened: OpenInode, size_bytes: int) -> None:
    """Note the size of a file written by passthrough; if less is allocated, it has holes."""
    end_bytes = round_up(size_bytes)
    if opened.front_bytes < 0:
        if not 0 < opened.allocated_bytes < end_bytes:
            return
        opened.front_bytes = opened.reach_bytes = 0
    opened.reach_bytes = max(opened.reach_bytes, end_bytes)


def growth_bytes(syscalls: Syscalls, opened: OpenInode, start_bytes: int, end_bytes: int) -> int:
    """Return how many bytes a coming write from *start_bytes* to *end_bytes* may allocate."""
    held_bytes = opened.allocated_bytes
    if opened.front_bytes < 0:
        if start_bytes <= held_bytes:
            return max(0, end_bytes - held_bytes)  # most writes
        opened.front_bytes = opened.reach_bytes = held_bytes
    if end_bytes <= opened.front_bytes:
        return 0
    reached_bytes = opened.reach_bytes
    opened.reach_bytes = max(reached_bytes, round_up(end_bytes))
    if start_bytes >= reached_bytes:
        return end_bytes - start_bytes
    lacking_bytes = opened.reach_bytes - held_bytes
    if lacking_bytes <= 0:
        opened.front_bytes = -1  # the holes are filled
        return 0
    hole_bytes = _next_hole(syscalls, opened.fd, max(start_bytes, opened.front_bytes))
    return min(max(0, end_bytes - hole_bytes), lacking_bytes)


def _next_hole(syscalls: Syscalls, fd: int, start_bytes: int) -> int:
    try:
        return syscalls.lseek(fd, start_bytes, os.SEEK_HOLE)
    except OSError:
        return start_bytes  # ENXIO: the file ends before it


def reserved(opened: OpenInode, end_bytes: int) -> None:
    """Note that all blocks up to *end_bytes* were allocated."""
    if opened.front_bytes >= 0:
        opened.front_bytes = max(opened.front_bytes, end_bytes)
        opened.reach_bytes = max(opened.reach_bytes, end_bytes)


def punched(opened: OpenInode, start_bytes: int) -> None:
    """Note that blocks from *start_bytes* on were freed, perhaps not all."""
    if opened.front_bytes < 0:
        opened.front_bytes = opened.reach_bytes = opened.allocated_bytes
    opened.front_bytes = min(opened.front_bytes, start_bytes)
