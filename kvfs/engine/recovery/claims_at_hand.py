"""What the files of blocks say by their identities, as threads have read it for the loop."""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Final

from kvfs.core.errors import NotAtHand
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.recovery.file_claims import block_record
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: What was read is kept for so many blocks until they are compared.
_KEPT_MAX: Final = 1024


class ClaimsAtHand:
    """Reads what the files of the blocks of one pool say, before the loop needs it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._claims: dict[InodeNo, InodeRecord | None] = {}
        self._reading: set[InodeNo] = set()

    def of(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino* that its file claims, None if it is not whole.

        Raises NotAtHand, OSError.
        """
        if not self._pool.background.device.is_serving:
            return self._read(ino)
        if ino not in self._claims:
            raise NotAtHand("what a file says", lambda: functools.partial(self._fetch, ino))
        return self._claims.pop(ino)

    def read_ahead(self, inos: Iterator[InodeNo]) -> None:
        """Have threads read what the files of *inos* say."""
        asks = self._pool.background.asks
        for ino in inos:
            if ino not in self._claims and ino not in self._reading and not asks.is_crowded:
                self._reading.add(ino)
                asks.submit(
                    functools.partial(self._read, ino),
                    functools.partial(self._keep, ino),
                    failed=functools.partial(self._fail, ino),
                )

    def _read(self, ino: InodeNo) -> InodeRecord | None:
        return block_record(self._pool.extents, self._pool.syscalls, ino)

    def _fetch(self, ino: InodeNo) -> Callable[[], None]:
        claim = self._read(ino)
        return lambda: self._keep(ino, claim)

    def _fail(self, ino: InodeNo, error: Exception) -> None:
        _log.warning("inode %#x is not compared yet: %s", ino, error)
        self._reading.discard(ino)

    def _keep(self, ino: InodeNo, claim: InodeRecord | None) -> None:
        self._reading.discard(ino)
        if len(self._claims) >= _KEPT_MAX:
            del self._claims[next(iter(self._claims))]
        self._claims[ino] = claim
