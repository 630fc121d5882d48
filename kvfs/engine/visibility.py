"""Who sees a draft: everybody, or only its writer if the policy of its directory says so.

While a block is rewritten with O_TRUNC, everybody but its writer sees the old version, or nothing
if a file server emptied it.
"""

from kvfs.core.lifecycle import HIDEABLE, State, is_temporary
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.rewrite.old_versions import OldVersions
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.pool.pool import Pool


class Visibility:
    """Decides who sees the drafts of one pool."""

    def __init__(self, pool: Pool, old: OldVersions) -> None:
        self._pool = pool
        self._old = old

    def seen(self, ino: InodeNo, record: InodeRecord, who: Maker) -> InodeNo | None:
        """Return the inode that *who* sees under the name of *record*, None if it sees none."""
        if record.state in HIDEABLE:
            if ino in self._old and not self._is_maker(who, ino, record):
                return self._old.of(ino)
            if self._is_emptied(ino):
                return ino if who == SERVER else None
            if self.hidden(ino, record, who):
                return None
        return ino

    def known_from_before(self, ino: InodeNo) -> bool:
        """Whether a file server emptied *ino*, and only file servers have it open.

        The kernel was told to forget its name, but another program may still reach it.
        """
        opened = self._pool.open_inodes.get(ino)
        if opened is None or not opened.emptied:
            return False
        served = opened.served_readers + opened.served_writers
        return opened.readers + opened.writers == served

    def _is_emptied(self, ino: InodeNo) -> bool:
        opened = self._pool.open_inodes.get(ino)
        return opened is not None and opened.emptied

    def hidden(self, ino: InodeNo, record: InodeRecord, who: Maker) -> bool:
        """Whether process *who* must not see *record* under its name."""
        if record.state not in HIDEABLE:
            return False
        return self.is_private(record) and not self._is_maker(who, ino, record)

    def _is_maker(self, who: Maker, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether *who* writes *ino*, or may be its writer.

        Processes that cannot be watched cannot be told apart. Under a temporary name any of them
        may be the writer, which must find the file to rename it. A file server, too, looks up what
        it has just made (FSAL VFS does at each CREATE), and its clients cannot be told apart.
        """
        opened = self._pool.open_inodes.get(ino)
        if opened is not None and opened.met and who.is_one:
            return any(hand.maker == who for hand in opened.hands)
        maker = self._maker(ino, record)
        return who == maker and (who != NOBODY or is_temporary(record.name))

    def is_private(self, record: InodeRecord) -> bool:
        """Whether only its maker may see the draft *record*, by its state or its directory."""
        if record.state == State.UNRENAMED:
            return True
        return self._pool.policies.of(record.parent).hides_drafts

    def trusts_name(self, record: InodeRecord, *, just_created: bool) -> bool:
        """Whether the kernel may cache the name; a draft's name can be taken by another writer.

        After the maker's own CREATE it may: a writer that takes the name does a LOOKUP first.
        """
        if record.state not in HIDEABLE:
            return True
        return just_created and not self.is_private(record)

    def _maker(self, ino: InodeNo, record: InodeRecord) -> Maker:
        opened = self._pool.open_inodes.get(ino)
        if opened is not None and opened.writers:
            return opened.maker
        return Maker(record.maker_tgid, record.maker_birth)
