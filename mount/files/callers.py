"""Who makes the request that is being handled, who pays for it, and the two permission checks here.

Where mounts may be id-mapped most requests name no user (fuse_get_req(), fs/fuse/dev.c). Those that
make something name the owner it will have, and that is root, if the mount says so. So there the
caller is looked up, as the machine knows it. What it is on its mount only the kernel knows.

The kernel makes all permission checks (default_permissions) but two. A CREATE that finds the name
taken is not checked (may_open(), fs/namei.c). And the check of an OPEN comes after its LOOKUP,
which is too late where the LOOKUP empties the file (truncating_open.py).
"""

import os
import stat
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from kvfs.core.inode_rules import rights_of
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.machine.process_ends import file_ids_in, status_of
from kvfs.machine.processes import OVERFLOW_UID, UNKNOWN_UID, Processes
from mount.files.handles import Handle, Handles
from mount.files.held_shares import HeldShares
from mount.files.kernel_port import KernelPort
from mount.fuse.channel import Requester
from mount.fuse.late import ANSWERS_FOR

_READ: Final = 4
_WRITE: Final = 2

#: capabilities(7), linux/capability.h.
_CAP_DAC_OVERRIDE: Final = 1
#: 65,536 groups of 11 digits (NGROUPS_MAX), and the rest.
_STATUS_MOST_BYTES: Final = 1 << 20


class PresentRequest(Protocol):
    """The request that is being handled; the channel implements this."""

    @property
    def present(self) -> Requester:
        """Who made it."""

    def about_to_wait(self) -> Callable[[], None]:
        """Let the next request be read while the handler waits.

        The handler calls the returned function before it goes on.
        """


class Callers:
    """The users who make the requests of one mount."""

    def __init__(self, request: PresentRequest, port: KernelPort, makers: Processes) -> None:
        """*port* knows with INIT whether the mount may be id-mapped."""
        self._request = request
        self._port = port
        self._makers = makers
        #: The request whose caller was looked up last, and who pays for it.
        self._looked_up = (0, OVERFLOW_UID)

    @property
    def are_named(self) -> bool:
        """Whether each request names its user."""
        return not self._port.idmapped

    def uid(self) -> int:
        """Return who makes the present request, UNKNOWN_UID if that cannot be told."""
        present = self._request.present
        return self._makers.uid_of(present.tid) if self._port.idmapped else present.uid

    def payer(self) -> int:
        """Return whose share an open file of the present request counts for."""
        present = self._request.present
        if not self._port.idmapped:
            return present.uid
        if self._looked_up[0] != present.unique:  # each is asked for twice
            self._looked_up = (present.unique, self._payer(present.tid))
        return self._looked_up[1]

    def waiter(self) -> int:
        """Return whose share it counts for that the task which runs now waits."""
        asked = ANSWERS_FOR.get()
        return self.payer() if asked is None else self.payer_of(asked.uid, asked.tid)

    def payer_of(self, uid: int, tid: int) -> int:
        """Return the user whose share a request of thread *tid*, sent as user *uid*, counts for.

        It need not be the request that is being handled.
        """
        return self._payer(tid) if self._port.idmapped else uid

    def _payer(self, tid: int) -> int:
        """Return the user of thread *tid*. Threads of unknown users have one share together."""
        uid = self._makers.uid_of(tid)
        return OVERFLOW_UID if uid == UNKNOWN_UID else uid


class Admission:
    """Whether the caller of the present request may open one more file, and who pays for it."""

    def __init__(
        self,
        held: HeldShares,
        handles: Handles,
        callers: Callers,
        give_up_one: Callable[[], bool],
    ) -> None:
        """*give_up_one* closes a handle that is only kept for a next reader; False: none."""
        self._held: Final = held
        self._handles: Final = handles
        self._callers: Final = callers
        self._give_up_one: Final = give_up_one

    def require_writer(self, directory: InodeNo) -> None:
        """Raise OverShare or TooManyOpen unless it may open one in *directory* to write."""
        payer = self._callers.payer()
        self._handles.shares.require_one(payer, self._give_up_one)
        self._held.require_draft(directory, payer)

    def require_reader(self, *, served: bool, costs_one: bool) -> None:
        """Raise TooManyOpen unless it may open one to read; *costs_one*: a descriptor.

        What is *served* to a file server does not stay (engine/blocks/served.py).
        """
        if costs_one:
            self.require_descriptor()
        if not served:
            self._held.require(self._callers.payer(), reads=True)

    def require_descriptor(self) -> None:
        """Raise TooManyOpen if it has used its share of the descriptors."""
        self._handles.shares.require_one(self._callers.payer(), self._give_up_one)

    def admit(self, handle: Handle, *, costs_one: bool) -> None:
        """Charge *handle* to it. Readers share a handle by the user that each request names."""
        if costs_one:
            self._handles.charge(handle, self._callers.payer())
        elif self._callers.are_named:
            self._handles.hold_for(handle, self._callers.payer())


class Credentials(NamedTuple):
    """What a thread may do now; uid and gid are those for file systems (setfsuid(2)).

    A request carries one uid and one gid (struct fuse_in_header). The rest is in /proc/TID/status,
    which can be read without waiting for the thread (process_ends.py).
    """

    uid: int
    gid: int
    groups: frozenset[int]
    #: Whether it passes every check of modes (CAP_DAC_OVERRIDE in this user namespace).
    overrides: bool


def credentials_of(tid: int) -> Credentials | None:
    """Return what thread *tid* may do, None if that cannot be told."""
    status = status_of(tid, most_bytes=_STATUS_MOST_BYTES)
    ids = file_ids_in(status)
    if ids is None:
        return None
    try:
        lines = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
        groups = frozenset(map(int, lines[b"Groups"].split()))
        capable = int(lines[b"CapEff"], 16) >> _CAP_DAC_OVERRIDE & 1
    except (LookupError, ValueError):
        return None
    return Credentials(ids.uid, ids.gid, groups, bool(capable) and _is_neighbour(tid))


def _is_neighbour(tid: int) -> bool:
    """Whether *tid* is in this user namespace: capabilities of another one say nothing here."""
    try:
        own, its = (os.stat(f"/proc/{who}/ns/user") for who in ("self", tid))
    except OSError:
        return False  # it ended, or this process may not look
    return (own.st_dev, own.st_ino) == (its.st_dev, its.st_ino)


def surely_may_open(record: InodeRecord, flags: int, uid: int, gid: int, *, sticky: bool) -> bool:
    """Whether *uid* with group *gid* may open *record* with open(2) *flags*; False: ask the kernel.

    The kernel alone knows other groups, capabilities, and its rule for *sticky* directories
    (fs.protected_regular).
    """
    if not stat.S_ISREG(record.mode):
        return False
    access = flags & os.O_ACCMODE
    needs = 0 if access == os.O_WRONLY else _READ
    if access != os.O_RDONLY or flags & os.O_TRUNC:
        needs |= _WRITE
    if uid == record.uid:
        granted = record.mode >> 6
    elif sticky:
        return False
    elif gid == record.gid:
        granted = record.mode >> 3
    else:  # perhaps in the group: both must allow it
        granted = record.mode >> 3 & record.mode
    return granted & needs == needs


def may_empty(record: InodeRecord, who: Credentials, *, reads: bool, sticky: bool) -> bool:
    """Whether *who* may open file *record* with O_TRUNC, and for reading too if it *reads*.

    The rules of acl_permission_check() and generic_permission(), fs/namei.c. In a *sticky*
    directory only its owner may: an O_CREAT by others, root included, would be refused
    (fs.protected_regular).
    """
    if sticky and who.uid != record.uid:
        return False
    if who.overrides:
        return True
    needs = _WRITE | (_READ if reads else 0)
    return rights_of(record, who.uid, who.groups | {who.gid}) & needs == needs
