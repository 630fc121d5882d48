"""How the kernel reaches the bytes of an open file: part of the reply to OPEN and CREATE."""

from typing import NamedTuple

from kvfs.core.types import BackingId


class Grant(NamedTuple):
    """FOPEN_* flags, and a backing id or 0."""

    open_flags: int
    backing_id: BackingId
