"""What fsck looks at in the files of inodes: do extents and identities agree with the index?"""

import contextlib
import functools
import stat
import time
from collections.abc import Callable, Container, Iterable

from kvfs.core.drives import Numbering
from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.inode_rules import identity_of
from kvfs.core.lifecycle import SETTLED, State, carries_identity
from kvfs.core.records import HAS_HOLES, AttributeRecord
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.recovery.file_claims import attributes_of, is_identified, is_identified_as
from kvfs.engine.recovery.fsck_rows import FsckReport
from kvfs.storage.extents import BROKEN_FILE, Extents
from kvfs.storage.index import Index
from kvfs.storage.kept_aside import StrayFiles


class FileCheck:
    """Checks files against the index; with *before_repair*, called before each repair, mends them.

    *leftovers* says that a server ended before it could tidy up. Then strays and outdated
    identities do not count as damage, since the next mount's sweep removes or renews them.
    """

    def __init__(
        self,
        index: Index,
        extents: Extents,
        stray_files: StrayFiles,
        report: FsckReport,
        *,
        before_repair: Callable[[], None] | None,
        leftovers: bool,
        missing: Container[int] = (),
    ) -> None:
        """Nothing is asked of the drives that are *missing*."""
        self._index = index
        self._extents = extents
        self._stray_files = stray_files
        self._report = report
        self._before_repair = before_repair
        self._leftovers = leftovers
        self._missing, self._drive = missing, Numbering(extents.drives).drive
        self.highest = InodeNo(0)

    def inode(self, ino: InodeNo, record: InodeRecord) -> str | None:
        """Return why *ino* must be dropped, None if its bytes are right. Mends its identity."""
        if self._drive(ino) in self._missing:
            self._report.unchecked += stat.S_ISREG(record.mode)
            return None
        self.highest = max(self.highest, self._extents.serial(ino))
        try:
            return self._compare(ino, record)
        except OSError as error:
            if error.errno not in BROKEN_FILE or not stat.S_ISREG(record.mode):
                raise
            return f"its extent is broken: {error.strerror}"

    def _compare(self, ino: InodeNo, record: InodeRecord) -> str | None:
        if stat.S_ISREG(record.mode):
            status = self._extents.stat(ino)
            if status is None:
                return "its extent is missing"
            if record.state not in SETTLED:
                return None if self._leftovers else "a draft without a server"
            # The writer of a slab may have been cut off: the next start measures it.
            measured_later = self._leftovers and record.state == State.SLAB
            if status.st_size != record.size_bytes and not measured_later:
                return f"its extent has {status.st_size} bytes of {record.size_bytes}"
        if self._agrees(ino, record):
            self._look_at_attributes(ino, record)
            return None
        if carries_identity(record):
            self._wrong(
                f"inode {ino:#x} {record.name!r}: its identity is missing or out of date",
                lambda: self._identify(ino, record),
            )
        else:
            self._wrong(
                f"inode {ino:#x} {record.name!r}: has the identity that it had before a rewrite",
                lambda: self._extents.unidentify(ino),
            )
        return None

    def _look_at_attributes(self, ino: InodeNo, record: InodeRecord) -> None:
        """Compare the attributes in the index with those in the file, which outlive a power loss.

        A damaged row is left to the check of rows, which may find its value in the file.
        """
        try:
            said = {name: self._index.xattr(ino, name) for name in self._index.xattrs(ino)}
        except Damaged:
            return
        found = attributes_of(self._extents, ino, record)
        if said != ({} if found is None else dict(found.attributes)):
            self._wrong(
                f"inode {ino:#x} {record.name!r}: its attributes are not in its file",
                lambda: self._write_attributes(ino, record),
            )

    def attribute(self, ino: InodeNo, name: bytes) -> bytes | None:
        """Return the value of attribute *name* in the file of *ino*; None if it has none."""
        record = self._index.inode_or_miss(ino)
        found = None if record is None else attributes_of(self._extents, ino, record)
        return None if found is None else found.attributes.get(name)

    def _write_attributes(self, ino: InodeNo, record: InodeRecord) -> None:
        """Write the attributes of *ino* into its file, which may have no room for them."""
        said = {name: self._index.xattr(ino, name) or b"" for name in self._index.xattrs(ino)}
        attributes = AttributeRecord(ino, record.sequence, said)
        with contextlib.suppress(NoSpace):
            self._extents.write_attributes(attributes, of_node=not stat.S_ISREG(record.mode))

    def strays(self) -> None:
        """Find the files that belong to no inode."""
        self._strays("extent", self._extents.scan(), of_node=False)
        self._strays("identity file", self._extents.scan_nodes(), of_node=True)

    def _strays(self, what: str, files: Iterable[InodeNo], *, of_node: bool) -> None:
        for ino in files:
            self.highest = max(self.highest, self._extents.serial(ino))
            if not self._index.knows(ino):
                text = f"{what} {ino:#x}: no inode knows it"
                self._wrong(text, functools.partial(self._put_aside, ino, of_node=of_node))

    def _put_aside(self, ino: InodeNo, *, of_node: bool) -> None:
        """Keep a stray with an identity for a day, as a sweep does; remove one without."""
        if is_identified(self._extents, ino, of_node=of_node):
            self._stray_files.move_in(ino, time.time_ns(), of_node=of_node)
        elif of_node:
            self._extents.forget_node(ino)
        else:
            self._extents.unlink(ino)

    def _wrong(self, text: str, repair: Callable[[], object]) -> None:
        """Note a problem of the files alone. Leftovers are mended, but are not a problem."""
        mended = self._before_repair is not None and self._mend(repair)
        if not self._leftovers or (self._before_repair is not None and not mended):
            self._report.problem(text)
            self._report.repaired += mended

    def _mend(self, repair: Callable[[], object]) -> bool:
        """Do *repair*; False if the file is broken, and needs xfs_repair or e2fsck first."""
        assert self._before_repair is not None
        self._before_repair()
        try:
            repair()
        except OSError as error:
            if error.errno not in BROKEN_FILE:
                raise
            return False
        return True

    def _agrees(self, ino: InodeNo, record: InodeRecord) -> bool:
        try:
            return is_identified_as(self._extents, ino, record)
        except OSError as error:
            if error.errno not in BROKEN_FILE or stat.S_ISREG(record.mode):
                raise
            return False  # a directory is not dropped because of its identity

    def _identify(self, ino: InodeNo, record: InodeRecord) -> None:
        """Write the identity of *ino*, a block's once its bytes are durable. Raises OSError."""
        with contextlib.suppress(Damaged):
            self._write_attributes(ino, record)
        identity = identity_of(ino, record)
        if stat.S_ISREG(record.mode):
            if self._extents.has_holes(ino):
                identity = identity._replace(flags=identity.flags | HAS_HOLES)
            self._extents.identify(ino, identity)
        else:
            self._extents.identify_node(ino, identity, record.target)
