"""Our mount as the kernel has it: it is taken away only if it is ours."""

import contextlib
import logging
from typing import Final

from kvfs.mount_table import kvfs_at, mount_at
from mount import kernel

_log: Final = logging.getLogger(__name__)


class OwnMount:
    """The mount at *mountpoint* that we made."""

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        #: ``major:minor``; "" if the mount table did not tell.
        self._number = ""
        self._mounted = False

    def begun(self) -> None:
        """It was mounted just now."""
        self._mounted = True
        with contextlib.suppress(OSError):
            present = kvfs_at(self._mountpoint)
            self._number = "" if present is None else present.device

    def ended(self) -> None:
        """The mount is gone, or was aborted."""
        self._mounted = False

    def unmount(self) -> None:
        """Unmount; a busy mount is detached, and its users get ENOTCONN once we are gone."""
        if not self._mounted:
            return
        self._mounted = False
        if not self._is_topmost():
            _log.warning("what is mounted at %s now is not ours, and stays", self._mountpoint)
            return
        for lazy in (False, True):
            with contextlib.suppress(OSError):
                kernel.unmount(self._mountpoint, lazy=lazy)
                return

    def _is_topmost(self) -> bool:
        """Whether an unmount of the mountpoint would take ours away, as far as is known."""
        if not self._number:
            return True
        try:
            topmost = mount_at(self._mountpoint)
        except OSError:
            return True
        return topmost is not None and topmost.device == self._number
