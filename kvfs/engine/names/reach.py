"""Who may reach a directory: who may search it, and all above it (path_resolution(7))."""

from collections.abc import Callable

from kvfs.core.errors import Damaged
from kvfs.core.inode_rules import Ascent
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.storage.index import Index


def reaches(
    index: Index,
    directory: InodeNo,
    may_search: Callable[[InodeRecord], bool],
    searched: dict[InodeNo, bool],
) -> bool:
    """Whether all from *directory* up may be searched, up to one that was *searched* before.

    Begin *searched* with the root. It gets what is found of *directory*.
    """
    above, ascent, passed = directory, Ascent(), list[InodeNo]()
    is_open = True
    while is_open and above not in searched and ascent.goes_on(above):
        try:
            record = index.inode(above)
        except Damaged:
            record = None
        if record is None:
            return False
        passed.append(above)
        is_open = may_search(record)
        above = record.parent
    is_open = is_open and searched.get(above, False)
    searched.update(dict.fromkeys(passed[:1], is_open))
    return is_open
