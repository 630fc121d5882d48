"""What the tables in shared memory have in common: their header, and a word that is stored at once.

They are in memfds, which outlive a server that may be killed between any two stores to memory.
"""

import mmap
import struct
from typing import Final

from kvfs.core.errors import FormatUnknown

_HEADER: Final = struct.Struct("<8sI4x")
#: In native order and alignment: one store writes it, so it is never half written.
WORD: Final = struct.Struct("@Q")
ALIGNED_BYTES: Final = WORD.size


def begin_table(memory: mmap.mmap, magic: bytes, version: int) -> None:
    """Write the header that ``require_table`` checks."""
    _HEADER.pack_into(memory, 0, magic, version)


def require_table(memory: mmap.mmap, magic: bytes, version: int, what: str) -> None:
    """Raise FormatUnknown unless *memory* is a table of *version*; *what* names it."""
    if _HEADER.unpack_from(memory) != (magic, version):
        raise FormatUnknown(f"the {what} of the last server has another layout")


#: What ends a record, by its length modulo 8: zeros up to a whole word, and a word of zeros where
#: the next record's length goes.
ENDS: Final = tuple(bytes((-rest & 7) + ALIGNED_BYTES) for rest in range(8))
