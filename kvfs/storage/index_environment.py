"""How the index's LMDB environment is opened, and whether it is of the format known here."""

import lmdb

from kvfs.core.errors import Damaged, FormatUnknown, IndexDamaged, ToolMissing
from kvfs.core.records import FORMAT_KEY, INDEX_FORMAT, parse_format
from kvfs.core.sizes import format_size


def check_format(path: str, map_size_bytes: int) -> None:
    """Raise IndexDamaged or FormatUnknown unless the index names the format known here.

    Raises ToolMissing as ``open_environment``.
    """
    env = open_environment(path, map_size_bytes, read_only=True)
    try:
        with env.begin() as txn:
            raw = txn.get(FORMAT_KEY)
        version = None if raw is None else parse_format(raw)
    except (lmdb.Error, Damaged) as error:
        raise IndexDamaged(f"index: {error}") from None
    finally:
        env.close()
    if version is None:
        raise IndexDamaged("index: it names no format version")
    if version != INDEX_FORMAT:
        raise FormatUnknown(f"index: found format {version}, supported is {INDEX_FORMAT}")


def open_environment(path: str, map_size_bytes: int, *, read_only: bool) -> lmdb.Environment:
    """Open LMDB without any fsync of its own; raises IndexDamaged, ToolMissing, OSError.

    ``writemap`` stays off: a wild write of this process could not reach the index. ``lock`` is on
    so that a copy taken in a thread pins its pages; read-only opens leave the lock file alone.
    ``max_spare_txns=1`` keeps one ended read transaction for the next ``begin``.
    """
    try:
        return lmdb.Environment(
            path,
            map_size=map_size_bytes,
            readonly=read_only,
            create=False,
            mode=0o700,
            sync=False,
            metasync=False,
            writemap=False,
            lock=not read_only,
            max_dbs=0,
            max_spare_txns=1,
        )
    except lmdb.MemoryError:  # of mmap: nothing of the index was looked at yet
        raise ToolMissing(
            f"index: no address space for its map of {format_size(map_size_bytes)}; "
            "`ulimit -v unlimited` or LimitAS=infinity of its unit gives it"
        ) from None
    except lmdb.Error as error:
        raise IndexDamaged(f"index: {error}") from None


def rows_bytes(env: lmdb.Environment) -> int:
    """Return how much of the map holds rows; what transactions freed does not count."""
    found = env.stat()
    pages = found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
    return pages * found["psize"]
