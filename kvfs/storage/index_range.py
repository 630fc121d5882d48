"""The index's committed rows of a range of keys, read in one transaction."""

import lmdb

from kvfs.storage.index_errors import raise_index_error


def committed_rows(
    env: lmdb.Environment, start: bytes, prefix: bytes, limit: int | None
) -> list[tuple[bytes, bytes]]:
    """Return up to *limit* rows from *start* on whose keys begin with *prefix*.

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
