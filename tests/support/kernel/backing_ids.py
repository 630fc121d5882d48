"""The kernel's table of backing ids, played by a test in place of the two ioctls."""

from typing import Final

import pytest

from kvfs.core.types import BackingId
from mount.fuse import kernel

#: A descriptor of /dev/fuse, which nobody uses here.
DEVICE_FD: Final = 3


class FakeIds:
    """The table."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Take the ioctls' place until *patch* is undone."""
        self.live: set[int] = set()
        self.given = 0
        self.fail_with = 0
        patch.setattr(kernel, "open_backing", self.open)
        patch.setattr(kernel, "close_backing", self.close)

    def open(self, _device_fd: int, _extent_fd: int) -> BackingId:
        """BACKING_OPEN."""
        if self.fail_with:
            raise OSError(self.fail_with, "no id")
        self.given += 1
        self.live.add(self.given)
        return BackingId(self.given)

    def close(self, _device_fd: int, backing_id: BackingId) -> None:
        """BACKING_CLOSE; ENOENT for an id that is not there."""
        assert backing_id in self.live, "an id was closed twice"
        self.live.remove(backing_id)
