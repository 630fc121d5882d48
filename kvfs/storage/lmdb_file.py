"""LMDB below the index: its file, how its environment is opened, its rows, and its errors.

Space is allocated ahead of LMDB. No module above the index uses ``lmdb``.

Some damage makes LMDB raise SIGBUS or SIGABRT, so what can be checked from outside is checked
first. The layout of LMDB's two meta pages is that of lib/mdb.c (MDB_page, MDB_meta, MDB_db) of
LMDB 0.9, data version 1, on a 64-bit machine.
"""

import errno
import os
import struct
from typing import Final, NamedTuple, NoReturn

import lmdb
from lmdb.verify import VerifyError, verify

from kvfs.core.errors import (
    NO_SPACE,
    Damaged,
    FormatUnknown,
    IndexDamaged,
    NoSpace,
    ReadOnly,
    ToolMissing,
)
from kvfs.core.index_room import KEPT_BYTES
from kvfs.core.pool_layout import DATA_NAME, LOCK_NAME
from kvfs.core.records import FORMAT_KEY, INDEX_FORMAT, parse_format
from kvfs.core.sizes import format_size
from kvfs.core.types import STAT_BLOCK_BYTES
from kvfs.storage.syscalls import Syscalls

#: The size that LMDB gives it for 126 readers: slots of 64 bytes and a header.
LOCK_FILE_BYTES: Final = 8192

#: LMDB may count pages at the end that it never wrote (allocated and freed in one transaction), so
#: a sound file may be shorter than its meta page says. Measured: up to 28 pages.
SPARE_PAGES: Final = 256

#: On a nearly full device less is allocated at a time, but at least this.
_LEAST_STEP_BYTES: Final = 256 << 10

#: LMDB gathers at most 64 pages in one write (MDB_COMMIT_PAGES).
_WRITE_BYTES: Final = 64 * 4096

_MAGIC: Final = 0xBEEFC0DE
_DATA_VERSION: Final = 1
_P_META: Final = 0x08
#: Page header (pgno, pad, flags, lower, upper), then magic, version, address, mapsize, then the
#: free list's and the main tree's MDB_db (pad, flags, depth, 3 counts, entries, root), then the
#: last page's number and the transaction's. The free list's pad is the page size.
_META_PAGE: Final = struct.Struct("<QHHHH" + "IIQQ" + "IHHQQQQQ" * 2 + "QQ")
assert _META_PAGE.size == 152
META_BYTES: Final = _META_PAGE.size

#: What the verifier reports for an index that was made as a copy: both meta pages have the same
#: commit. Harmless: the next commit goes to the page of its parity.
_COPIED: Final = ("(parity violation)", "meta pages share nonzero txnid")

_FULL = NO_SPACE | {errno.EFBIG}
# PageFullError is LMDB's internal error: a page whose own numbers contradict each other.
_BROKEN_TREE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PageFullError)


class Meta(NamedTuple):
    """The fields of one meta page that kvfs needs; ``last_page`` is the last page in use."""

    psize_bytes: int
    last_page: int
    transaction: int


class Tree(NamedTuple):
    """One of LMDB's two trees: its root's page number, and its depth, 0 for an empty one."""

    root: int
    depth: int


def newest_trees(path: str) -> tuple[int, int, tuple[Tree, Tree]]:
    """Return page size, last page, and the trees (free lists, rows) of the last commit.

    Call ``check_data_file`` before. Raises IndexDamaged, FormatUnknown.
    """
    with open(f"{path}/{DATA_NAME}", "rb") as file:
        first = file.read(META_BYTES)
        file.seek(parse_meta(first, 0).psize_bytes)
        second = file.read(META_BYTES)
    raw = max((first, second), key=lambda raw: parse_meta(raw, 0).transaction)
    fields, meta = _META_PAGE.unpack(raw), parse_meta(raw, 0)
    free, rows = Tree(fields[16], fields[11]), Tree(fields[24], fields[19])
    return meta.psize_bytes, meta.last_page, (free, rows)


def parse_meta(raw: bytes, page: int) -> Meta:
    """Return the fields of meta page *page*; raises IndexDamaged, FormatUnknown."""
    if len(raw) < META_BYTES:
        raise IndexDamaged(f"index: {DATA_NAME} ends inside its meta page {page}")
    fields = _META_PAGE.unpack_from(raw)
    flags, magic, version, psize = fields[2], fields[5], fields[6], fields[9]
    if magic != _MAGIC or not flags & _P_META:
        raise IndexDamaged(f"index: {DATA_NAME} has no LMDB meta page {page}")
    if version != _DATA_VERSION:
        raise FormatUnknown(
            f"index: {DATA_NAME} has LMDB data version {version}; supported is {_DATA_VERSION}"
        )
    return Meta(psize, fields[-2], fields[-1])


def check_data_file(path: str, *, spare_pages: int = 0) -> int:
    """Return how many bytes of the data file are in use, according to LMDB.

    Raises IndexDamaged or FormatUnknown unless it looks like a whole LMDB file, of which
    *spare_pages* at the end may be missing. Only its two meta pages and its length are checked;
    ``verify_data_file`` looks for damage inside a tree page.
    """
    try:
        fd = os.open(f"{path}/{DATA_NAME}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise IndexDamaged(f"index: {DATA_NAME}: {error.strerror}") from None
    try:
        size_bytes = os.fstat(fd).st_size
        first = parse_meta(os.pread(fd, META_BYTES, 0), 0)
        psize = first.psize_bytes
        if psize.bit_count() != 1 or not 512 <= psize <= 32768:
            raise IndexDamaged(f"index: {DATA_NAME} claims pages of {psize} bytes")
        second = parse_meta(os.pread(fd, META_BYTES, psize), 1)
    finally:
        os.close(fd)
    newest = max(first, second, key=lambda meta: meta.transaction)
    used_bytes = (newest.last_page + 1) * psize
    if size_bytes < used_bytes - spare_pages * psize:
        raise IndexDamaged(f"index: {DATA_NAME} is cut short: {size_bytes} bytes of {used_bytes}")
    return used_bytes


class IndexFile:
    """Keeps data.mdb allocated at least one step ahead of what LMDB has used.

    On a full file system LMDB cannot even delete, since it writes every changed page to a new
    place; with space allocated ahead it can. The file is also made longer (no FALLOC_FL_KEEP_SIZE):
    writes inside it then change no file size, and a page that LMDB counted but never wrote reads as
    zeros instead of killing the process with SIGBUS.
    """

    def __init__(self, path: str, step_bytes: int, limit_bytes: int, syscalls: Syscalls) -> None:
        """Open the file; allocate nothing yet. *limit_bytes* is LMDB's map size. Raises OSError."""
        self._syscalls = syscalls
        self._step_bytes = step_bytes
        self._limit_bytes = limit_bytes
        self._fd = syscalls.open(f"{path}/{DATA_NAME}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = syscalls.fstat(self._fd)
        except BaseException:
            syscalls.close(self._fd)
            raise
        # A file with holes (it was copied or extended) counts as not allocated at all.
        whole = status.st_blocks * STAT_BLOCK_BYTES >= status.st_size
        self.allocated_bytes = status.st_size if whole else 0
        self._size_bytes = status.st_size

    def due(self, used_bytes: int) -> bool:
        """Whether less than one step is allocated beyond *used_bytes*."""
        return self.allocated_bytes < min(used_bytes + self._step_bytes, self._limit_bytes)

    def allocate(self, used_bytes: int, *, whole: bool = False) -> None:
        """Allocate two steps beyond *used_bytes*, at most to the end of LMDB's map.

        Allocates less if the device has less, unless *whole*. Takes some 100 us for 64 MiB on XFS.
        Raises NoSpace, OSError.
        """
        start_bytes = self.allocated_bytes
        end_bytes = min(used_bytes + 2 * self._step_bytes, self._limit_bytes)
        if end_bytes <= start_bytes:
            return
        while True:
            try:
                self._syscalls.fallocate(self._fd, 0, start_bytes, end_bytes - start_bytes)
            except OSError as error:
                if error.errno not in NO_SPACE | {errno.EFBIG}:
                    raise
                size_bytes = (end_bytes - start_bytes) // 4
                if whole or size_bytes < _LEAST_STEP_BYTES:
                    raise NoSpace(
                        f"index: no room for {format_size(end_bytes)} of {DATA_NAME}"
                    ) from error
                end_bytes = start_bytes + size_bytes
            else:
                break
        # max: a request that needs space for a name may have allocated more, in another thread.
        self.allocated_bytes = max(self.allocated_bytes, end_bytes)

    def rows_end_bytes(self) -> int:
        """Return how many of the allocated bytes rows may use; the rest is for deletes."""
        kept_bytes = min(KEPT_BYTES, self._step_bytes, self.allocated_bytes // 4)
        return self.allocated_bytes - kept_bytes

    def full(self) -> bool:
        """Whether the file system has less free space than LMDB writes at once. Raises OSError."""
        status = self._syscalls.statvfs(self._fd)
        return status.f_bavail * status.f_frsize < _WRITE_BYTES

    def cover(self, used_bytes: int) -> None:
        """Make the file at least *used_bytes* long, without allocating: for a full file system.

        A read of LMDB's map beyond the end of the file raises SIGBUS; a hole reads as zeros, which
        LMDB reports as damage. Raises OSError.
        """
        if self._size_bytes < used_bytes:
            self._syscalls.ftruncate(self._fd, used_bytes)

    def close(self) -> None:
        """Close the file; what is allocated stays."""
        self._syscalls.close(self._fd)


def verify_data_file(path: str) -> list[str]:
    """Return what is structurally wrong with the data file, read without LMDB itself: for fsck.

    Python code walks every page, so damage cannot crash it: 5 s for a million inodes. Nobody may
    write meanwhile. It also reports the space that LMDB keeps if one transaction replaces a value
    over 2 KB by a smaller one, so no transaction may write such a key twice.
    """
    try:
        problems: list[str] = verify(f"{path}/{DATA_NAME}", subdir=False)  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]
    return [line for line in problems if not any(words in line for words in _COPIED)]


def allocate_lock_file(path: str, syscalls: Syscalls) -> None:
    """Create lock.mdb if missing, with its blocks.

    LMDB writes to it by a map: SIGBUS on a full file system. Raises NoSpace, OSError.
    """
    fd = syscalls.open(f"{path}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A full XFS refuses to allocate even what is allocated already.
        if syscalls.fstat(fd).st_blocks * STAT_BLOCK_BYTES < LOCK_FILE_BYTES:
            syscalls.fallocate(fd, 0, 0, LOCK_FILE_BYTES)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoSpace(f"index: no room for {LOCK_NAME}") from error
        raise
    finally:
        syscalls.close(fd)


# ---- its environment, rows and errors ----


def check_format(path: str, map_size_bytes: int) -> None:
    """Raise IndexDamaged or FormatUnknown unless the index has format INDEX_FORMAT.

    Raises ToolMissing as ``open_environment`` does.
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

    ``writemap`` is off, so that a stray write of this process cannot reach the index. ``lock`` is
    on so that a copy taken in a thread pins its pages; read-only opens do not touch the lock file.
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
    except lmdb.MemoryError:  # from mmap: nothing of the index was read yet
        raise ToolMissing(
            f"index: no address space for its map of {format_size(map_size_bytes)}; "
            "`ulimit -v unlimited` or LimitAS=infinity of its unit gives it"
        ) from None
    except lmdb.Error as error:
        raise IndexDamaged(f"index: {error}") from None


def rows_bytes(env: lmdb.Environment) -> int:
    """Return how many bytes of the map hold rows; freed pages do not count."""
    found = env.stat()
    pages = found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
    return pages * found["psize"]


def committed_rows(
    env: lmdb.Environment, start: bytes, prefix: bytes, limit: int | None
) -> list[tuple[bytes, bytes]]:
    """Return up to *limit* (None: all) rows from *start* on whose keys begin with *prefix*.

    Raises Damaged where LMDB's tree is broken.
    """
    found: list[tuple[bytes, bytes]] = []
    if limit is not None and limit <= 0:
        return found
    try:
        with env.begin() as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return found
            for row in cursor.iternext(keys=True, values=True):
                if not row[0].startswith(prefix):
                    break
                found.append(row)
                if len(found) == limit:
                    break
    except lmdb.Error as error:
        raise_index_error(error)
    return found


def raise_index_error(error: lmdb.Error | OSError) -> NoReturn:
    """Raise NoSpace, Damaged, ReadOnly or OSError for an error of a transaction.

    NoSpace: the map or the file system is full. Damaged: LMDB cannot follow its tree. ReadOnly: the
    index is open read-only. Anything else is an OSError, with LMDB's code if that is an errno.
    """
    if isinstance(error, lmdb.ReadonlyError):
        raise ReadOnly("index: opened read-only") from error
    code = error.errno if isinstance(error, OSError) else error.code
    if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or code in _FULL:
        raise NoSpace(f"index: {error}") from error
    if isinstance(error, _BROKEN_TREE):
        raise Damaged(f"index: {error}") from error
    if isinstance(error, OSError):
        raise error
    raise OSError(code if code and code > 0 else errno.EIO, f"index: {error}") from error
