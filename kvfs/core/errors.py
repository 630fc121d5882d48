"""What can go wrong. Only mount/fuse/errno_map.py turns these errors into errno numbers.

A client sees an errno for a ``KvfsError``. The operator of a command sees one line and the exit
code of a ``CommandError``.
"""

import errno
from collections.abc import Callable
from typing import ClassVar, Final

from kvfs.core.types import NO_INODE, InodeNo

#: What a full device answers, whatever the pool's capacity is.
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class KvfsError(Exception):
    """Base of everything kvfs raises on purpose."""


class NotFound(KvfsError):
    """No such name."""


class Exists(KvfsError):
    """The name is taken."""


class NotAtHand(Exception):
    """The request lacks something of the device, for which the loop's thread must not wait.

    It is raised before anything is changed. Who answers the request has it brought, and asks again.
    ``begin`` is called on the loop and returns the work, which may wait for the device. The work
    runs in a thread and returns what follows on the loop; that may raise what the request gets.
    """

    def __init__(
        self,
        what: str,
        begin: Callable[[], Callable[[], Callable[[], None]]],
        *,
        in_order: bool = False,
        stores: bool = False,
        ino: InodeNo = NO_INODE,
    ) -> None:
        """*in_order*: the work follows all that the device's thread was given before.

        *stores*: it is needed to store bytes, and not to load them. *ino*: it needs the drive that
        holds that inode's file.
        """
        super().__init__(what)
        self.begin: Final = begin
        self.in_order: Final = in_order
        self.stores: Final = stores
        self.ino: Final = ino

    def beginning(self, first: Callable[[], None]) -> "NotAtHand":
        """Return the same lack; *first* is called on the loop when its work begins."""

        def begin() -> Callable[[], Callable[[], None]]:
            first()
            return self.begin()

        return NotAtHand(str(self), begin, in_order=self.in_order, stores=self.stores, ino=self.ino)

    @classmethod
    def under_way(cls, what: str, *, stores: bool = False, ino: InodeNo = NO_INODE) -> "NotAtHand":
        """Return one for *what* the device's thread does already, and only has to end."""
        return cls(what, _no_work, in_order=True, stores=stores, ino=ino)


def _no_work() -> Callable[[], Callable[[], None]]:
    return lambda: lambda: None


class DeviceSilent(KvfsError):
    """The device does not answer, and the request cannot wait longer (EIO)."""


class TooManyWaiting(DeviceSilent):
    """So many requests of its tenant wait for a silent device that one more may not (EIO)."""


class NotADirectory(KvfsError):
    """A directory was needed."""


class IsADirectory(KvfsError):
    """A directory stands where a file was needed."""


class NotEmpty(KvfsError):
    """The directory still has names."""


class InvalidRequest(KvfsError):
    """The arguments do not fit together (EINVAL)."""


class NameTooLong(KvfsError):
    """A name over NAME_MAX_BYTES or a target over TARGET_MAX_BYTES."""


class NotPermitted(KvfsError):
    """kvfs does not do this: device nodes, links to what is published (EPERM)."""


class TooManyLinks(KvfsError):
    """A block has two names at most (EMLINK)."""


class AccessDenied(KvfsError):
    """The caller may not use what the name leads to (EACCES)."""


class Unsupported(KvfsError):
    """The operation does not exist here (EOPNOTSUPP)."""


class NoSuchAttribute(KvfsError):
    """The extended attribute is not set (ENODATA)."""


class AttributeTooLarge(KvfsError):
    """An extended attribute over the bounds of the settings (E2BIG)."""


class NoSpace(KvfsError):
    """The pool is full and nothing can be evicted."""


class TooLarge(KvfsError):
    """An offset beyond what a file can hold (EFBIG)."""


class OverShare(KvfsError):
    """A tenant keeps more of the pool from eviction than its share (EDQUOT)."""


class TooManyOpen(KvfsError):
    """One user has as many of the server's descriptors open as a user may (EMFILE)."""


class BadHandle(KvfsError):
    """The handle was never given out, or is closed, or has the wrong mode."""


class DeadInode(KvfsError):
    """The inode is gone; the kernel looks the name up again (ESTALE)."""


class ReadOnly(KvfsError):
    """The pool is mounted read-only."""


class Damaged(KvfsError):
    """Bytes on the device are not what was written: a miss, and a counter."""


class CommandError(KvfsError):
    """A command that ends with one line for the operator and its own exit code."""

    exit_code: ClassVar[int] = 1

    def __init__(self, found: str = "", advice: str = "") -> None:
        """*found* says what is wrong; *advice* what helps, which some verbs leave out."""
        super().__init__(f"{found}; {advice}" if advice else found)
        self.found = found


class UsageError(CommandError):
    """Wrong flags or settings."""

    exit_code = 2


class NotRoot(CommandError):
    """The command needs root."""

    exit_code = 3


class SourceMissing(CommandError):
    """SOURCE does not exist, may not be written, or is of a kind that kvfs cannot use."""

    exit_code = 4


class SourceForeign(CommandError):
    """SOURCE holds something that is not a pool."""

    exit_code = 5


class SourceBusy(CommandError):
    """SOURCE is in use, or the pool is mounted already."""

    exit_code = 6


class MountpointUnusable(CommandError):
    """MOUNTPOINT is missing, not a directory, in use, inside SOURCE, or the server needs it."""

    exit_code = 7


class FormatUnknown(CommandError):
    """The pool was written by another format version."""

    exit_code = 8


class IndexDamaged(CommandError):
    """The index cannot be read; ``kvfs fsck --repair`` rebuilds it."""

    exit_code = 9


class SourceFull(CommandError):
    """No space for the pool itself."""

    exit_code = 10


class NotMounted(CommandError):
    """No kvfs is mounted there."""

    exit_code = 11


class ServeFailed(CommandError):
    """The mount failed to start, or ended with an error."""

    exit_code = 12


class ToolMissing(CommandError):
    """A program, a kernel feature or a process limit that the command needs is missing."""

    exit_code = 13


class CheckFailed(CommandError):
    """fsck found damage and was not asked to repair it."""

    exit_code = 14


class BenchFailed(CommandError):
    """A job of the benchmark failed on one side, or read other bytes than it stored."""

    exit_code = 15


class VerifyFailed(CommandError):
    """A load read other bytes than it stored, or missed a block that it stored."""

    exit_code = 16


class SourceBlank(CommandError):
    """SOURCE is blank: ``kvfs mkfs`` or ``kvfs mount`` makes it a pool."""

    exit_code = 17


class SourceDamaged(CommandError):
    """SOURCE fails: I/O errors, or an XFS that cannot be made or mounted."""

    exit_code = 18


class SeriousFindings(CommandError):
    """`kvfs doctor` found something that breaks a promise."""

    exit_code = 19


class PathMissing(CommandError):
    """A path that was named does not exist on the mount, or nothing matches or could be read."""

    exit_code = 20


class EvictedTooLittle(CommandError):
    """Less could be evicted than was asked for."""

    exit_code = 21


class ConfigUnwritable(CommandError):
    """A file of an NFS server's configuration cannot be read or written."""

    exit_code = 22


class ConfigForeign(CommandError):
    """Lines of somebody else in an NFS server's configuration are in the way."""

    exit_code = 23


class TraceUnreadable(CommandError):
    """A request trace is missing, empty, or has a line that is no request."""

    exit_code = 24


class WrongBytes(CommandError):
    """Blocks had other bytes than were stored. They are misses now."""

    exit_code = 26


class SyncedTooLittle(CommandError):
    """Some blocks that should be durable by now are not."""

    exit_code = 25


class DriveMissing(CommandError):
    """fsck found no damage, and could not look at a drive that is missing."""

    exit_code = 28


class DriveNeeded(CommandError):
    """The drive cannot be drained or removed."""

    exit_code = 27


class KeyUnusable(CommandError):
    """The key of an encrypted SOURCE is missing, unfit, wrong, or went with the last boot."""

    exit_code = 29


class _SpaceErrors:
    """Turns ENOSPC and EDQUOT of a ``with`` block into NoSpace; a generator takes 3 us more."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise NoSpace(str(error)) from error


SPACE_ERRORS: Final = _SpaceErrors()
