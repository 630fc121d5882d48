"""A block that was found, in the index by a scan or by its file: its lease and its rank.

That it was found is no use of it. So its last change counts as its last use, and a process of
another boot as ended.
"""

from typing import Final

from kvfs.core.lifecycle import SETTLED, State
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.pool import ranks
from kvfs.pool.pool import Pool

_OWNED: Final = SETTLED - {State.PUBLISHED}
#: No process has this number. It stands for a maker of another boot, whose birth means nothing now.
_OF_ANOTHER_BOOT: Final = (1 << 32) - 1


def enter_lease(pool: Pool, ino: InodeNo, record: InodeRecord) -> None:
    """Enter a block that belongs to somebody, a slab or an orphan; another one leaves the table."""
    if record.state in _OWNED and record.maker_tgid and not pool.same_boot:
        record = record._replace(maker_tgid=_OF_ANOTHER_BOOT)
    pool.leases.note(ino, record, pool.monotonic_s())


def enter_rank(pool: Pool, ino: InodeNo, record: InodeRecord) -> None:
    """Rank a block that is whole."""
    if record.state in SETTLED:
        ranks.note(pool, ino, record, used_s=max(0, record.ctime_ns // SECOND_NS))
