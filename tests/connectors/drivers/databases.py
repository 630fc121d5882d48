"""Databases that keep a KV tier in files which need each other: RocksDB, and SQLite with its WAL.

The argument says which one. It takes pages by number, and gives back those that it has.
"""

import os
import sqlite3
import sys
from collections.abc import Iterator

from json_lines import serve
from rocksdict import Options, Rdict

PAGE_BYTES = 10_000
#: Small, so that a few megabytes are many files.
BUFFER_BYTES = 1 << 20


def page(number: int) -> bytes:
    """What is stored as *number*."""
    return number.to_bytes(8, "little") * (PAGE_BYTES // 8)


class RocksDB:
    """As AIBrix has it: one database in a directory of its own."""

    def __init__(self, directory: str) -> None:
        options = Options(raw_mode=False)
        options.create_if_missing(True)
        options.set_write_buffer_size(BUFFER_BYTES)
        self._base = Rdict(directory, options)

    def put(self, numbers: range) -> None:
        for number in numbers:
            self._base[number] = page(number)
        self._base.flush()

    def rows(self) -> Iterator[tuple[int, bytes]]:
        for number, data in self._base.items():
            yield int(number), bytes(data)

    def close(self) -> None:
        self._base.close()


class SQLite:
    """A manifest as lifeboat has it, with the pages in it, and a WAL that is never checkpointed."""

    def __init__(self, directory: str) -> None:
        self._base = sqlite3.connect(os.path.join(directory, "base.sqlite"), isolation_level=None)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA wal_autocheckpoint=0")
        self._base.execute(
            "CREATE TABLE IF NOT EXISTS page (number INTEGER PRIMARY KEY, data BLOB)"
        )

    def put(self, numbers: range) -> None:
        for number in numbers:
            self._base.execute("INSERT INTO page VALUES (?, ?)", (number, page(number)))

    def rows(self) -> Iterator[tuple[int, bytes]]:
        assert self._base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        yield from self._base.execute("SELECT number, data FROM page")

    def close(self) -> None:
        self._base.close()


class Databases:
    """The verbs."""

    def open(self, directory: str) -> None:
        """Open the database, or make it."""
        self._base = {"rocksdb": RocksDB, "sqlite": SQLite}[sys.argv[2]](directory)

    def put(self, count: int) -> None:
        """Store the pages 0 to *count* - 1."""
        self._base.put(range(count))

    def right(self) -> int:
        """Return how many pages there are, all of which are as stored."""
        found = 0
        for number, data in self._base.rows():
            assert data == page(number), f"page {number} has other bytes"
            found += 1
        return found

    def close(self) -> None:
        """Close it."""
        self._base.close()


if __name__ == "__main__":
    serve(Databases(), "open", "put", "right", "close")
