"""What a killed server leaves in shared memory (notes, journal), with garbage behind it.

Nobody but a server writes there. It may be killed inside the copying of a record: then any part of
it is behind the last whole one, and its length, which is stored last, is not there.
"""

import os
from collections.abc import Iterator
from typing import Final

from kvfs.core.types import InodeNo
from kvfs.storage.journal import Journal
from kvfs.storage.outliving import Notes
from kvfs.storage.shared_table import ALIGNED_BYTES

_KEYS: Final = 5
#: The commit that all waiting rows follow.
_COMMIT: Final = 3


def _changes(data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield keys with values, None for one that goes, which *data* chooses."""
    for at in range(0, len(data) - 1, 2):
        kind, length = data[at], data[at + 1]
        value = data[at : at + length] * (1 + kind % 7) if kind & 1 else None
        yield b"%d" % (kind % _KEYS), value


def notes(data: bytes) -> None:
    """The next server finds what was put last, also behind the garbage of a kill."""
    half = len(data) // 2
    expected: dict[bytes, bytes] = {}
    fd = os.memfd_create("notes")
    try:
        first = Notes(fd)
        for key, value in _changes(data[:half]):
            if value is None:
                first.drop(key)
                expected.pop(key, None)
            else:
                first.put(key, value)
                expected[key] = value
        garbage_at = first._start + first._at + ALIGNED_BYTES
        first.close()
        os.pwrite(fd, data[half:][: max(0, os.fstat(fd).st_size - garbage_at)], garbage_at)
        for _ in range(2):
            found = Notes(fd)
            assert found.below(b"") == expected
            found.put(b"next", data)
            expected[b"next"] = data
            found.close()
    finally:
        os.close(fd)


def journal(data: bytes) -> None:
    """The next server finds the rows that wait, and what was done."""
    half = len(data) // 2
    expected: dict[bytes, bytes | None] = {}
    fd = os.memfd_create("journal")
    try:
        first = Journal(fd)
        first.waiting(_COMMIT)
        made: dict[int, InodeNo] = {}
        for request, (key, value) in enumerate(_changes(data[:half]), start=1):
            deed = (request, InodeNo(request + 16))
            if first.keep({key: value}, deed):
                expected[key] = value
                made[deed[0]] = deed[1]
        garbage_at = first._at + ALIGNED_BYTES
        first.close()
        os.pwrite(fd, data[half:][: max(0, os.fstat(fd).st_size - garbage_at)], garbage_at)
        found = Journal(fd)
        assert found.waiting(_COMMIT) == expected
        assert found.done() == made
        assert found.keep({b"next": data}, None)
        found.close()
        again = Journal(fd)
        assert again.waiting(_COMMIT) == expected | {b"next": data}
        # Of another commit nothing waits; whatever was announced is done or not.
        assert again.waiting(_COMMIT + 1) == {}
        again.done()
        again.close()
    finally:
        os.close(fd)
