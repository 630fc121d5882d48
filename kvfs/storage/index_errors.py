"""What LMDB's errors mean in kvfs's words, in one place: nothing above the index names ``lmdb``."""

import errno
from typing import NoReturn

import lmdb

from kvfs.core.errors import NO_SPACE, Damaged, NoSpace, ReadOnly

_FULL = NO_SPACE | {errno.EFBIG}
# PageFullError is LMDB's internal error: a page whose own numbers contradict each other.
_BROKEN_TREE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PageFullError)


def raise_index_error(error: lmdb.Error | OSError) -> NoReturn:
    """Raise NoSpace, Damaged, ReadOnly or OSError for an error of a transaction.

    The map being full and the file system being full are both NoSpace. A tree that LMDB cannot
    follow is Damaged. Anything else is an OSError with LMDB's code where that is an errno.
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
