"""What the reply to OPEN or CREATE tells the kernel of how to reach the bytes."""

from typing import NamedTuple

from kvfs.core.types import BackingId


class Grant(NamedTuple):
    """FOPEN_* flags, and a backing id or 0."""

    open_flags: int
    backing_id: BackingId
