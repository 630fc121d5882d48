"""What the tables in shared memory have in common: magic and version at the start, and one store.

They lie in memfds, which outlive a server that is killed between any two stores to memory.
"""

import mmap
import struct
from typing import Final

from kvfs.core.errors import FormatUnknown

_HEADER: Final = struct.Struct("<8sI4x")
#: In native order and alignment: written by one store, so that it is there or not.
WORD: Final = struct.Struct("@Q")
ALIGNED_BYTES: Final = WORD.size


def begin_table(memory: mmap.mmap, magic: bytes, version: int) -> None:
    """Write what ``require_table`` looks for."""
    _HEADER.pack_into(memory, 0, magic, version)


def require_table(memory: mmap.mmap, magic: bytes, version: int, what: str) -> None:
    """Raise FormatUnknown unless *memory* is a table of *version*; *what* names it."""
    if _HEADER.unpack_from(memory) != (magic, version):
        raise FormatUnknown(f"the {what} of the last server has another layout")


#: What ends a record, by the rest of its length by 8: zeros up to a whole word, and a word of zeros
#: in place of the length of the next one.
ENDS: Final = tuple(bytes((-rest & 7) + ALIGNED_BYTES) for rest in range(8))
