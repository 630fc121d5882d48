"""NIXL's POSIX plug-in with each of its three I/O queues; all of them asynchronous to the file."""

from typing import Any, ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles, Deletes, Start
from tests.connectors.contract_eviction import EvictedAfterItsProcess, RefusedByAFullPool

pytestmark = pytest.mark.connectors


class NixlPosix(BlockFiles, Deletes, EvictedAfterItsProcess, RefusedByAFullPool):
    """What the queues share: blocks written in place, eight in flight at once."""

    driver = ("nixl_posix",)
    tested_version = "nixl 1.5.1"
    size_bytes = 2 * MIB
    blocks = 16
    overwrites = True
    queue: ClassVar[str]

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        return {"slots": 8, "queue": self.queue, "o_direct": self.o_direct}

    def test_works_with_this_queue(self, start: Start) -> None:
        """The plug-in runs the queue that was asked for."""
        start()
        assert self.opened[self.queue] == "true"


class TestLibaio(NixlPosix):
    """libaio, NIXL's default, through the page cache."""

    queue = "use_aio"


class TestLibaioDirect(NixlPosix):
    """libaio with O_DIRECT, where it is asynchronous indeed."""

    queue = "use_aio"
    o_direct = True


class TestIoUringDirect(NixlPosix):
    """io_uring with O_DIRECT."""

    queue = "use_uring"
    o_direct = True


class TestPosixAio(NixlPosix):
    """glibc's aio threads, through the page cache."""

    queue = "use_posix_aio"


class TestIoUringDirectDaemonPath(TestIoUringDirect):
    """io_uring with O_DIRECT without passthrough: every byte goes through the daemon."""

    data_path = "daemon"
