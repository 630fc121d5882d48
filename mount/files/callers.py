"""Who makes the request that is being handled, and whose share its open file counts for.

Where mounts may be id-mapped most requests name no user (fuse_get_req(), fs/fuse/dev.c). Those that
make something name the owner it will have, and that is root, if the mount says so. So there the
caller is looked up, as the machine knows it. What it is on its mount only the kernel knows.
"""

from collections.abc import Callable
from typing import Protocol

from kvfs.machine.processes import OVERFLOW_UID, UNKNOWN_UID, Processes
from mount.files.kernel_port import KernelPort
from mount.fuse.channel import Requester


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

    def payer_of(self, uid: int, tid: int) -> int:
        """Return whose share it counts for that thread *tid* opened, as user *uid* by its request.

        Another server was asked for it.
        """
        return self._payer(tid) if self._port.idmapped else uid

    def _payer(self, tid: int) -> int:
        """Return the user of thread *tid*; all that are unknown have one share together."""
        uid = self._makers.uid_of(tid)
        return OVERFLOW_UID if uid == UNKNOWN_UID else uid
