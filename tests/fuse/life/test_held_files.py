"""Files that something holds open behind their close: io_uring, a mapping. And then a death."""

import os
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.life.test_dying_writers import GONE_WAIT_S, gone, settled
from tests.support.clients.stamped import state
from tests.support.clients.stepping import Stepping, until
from tests.support.kernel.calls import read_file
from tests.support.kernel.uring import is_disabled

pytestmark = [
    pytest.mark.usefixtures("kvfs_only"),
    pytest.mark.skipif(is_disabled(), reason="kernel.io_uring_disabled"),
]
WRITER: Final = "tests.support.clients.uring_writers"
LARGE_BYTES: Final = 512 << 20
#: The server may answer what its size is only behind all writes.
TRIES: Final = 10
SIZE: Final = 1 << 20


def is_killed_while_it_writes(block: Path) -> bool:
    """Kill who writes *block* behind its close; False: all was written before."""
    with Stepping(WRITER, "closes_while_writing", block, str(LARGE_BYTES)) as writer:
        assert writer.at() == "ready"
        writer.to("closed")
        until(lambda: os.stat(block).st_size > 0, "some of it is written", pause_s=0.001)
        cut = os.stat(block).st_size < LARGE_BYTES
        writer.kill()
    until(lambda: settled(block), "published or gone", GONE_WAIT_S)
    # It may have ended between the look and the kill.
    if os.path.exists(block):
        assert os.stat(block).st_size == LARGE_BYTES
        os.unlink(block)
    return cut


@pytest.mark.parametrize("number", range(4))
def test_killed_while_the_ring_writes_behind_the_close(kv: Path, number: int) -> None:
    """[life-torn] The close was a living process's, the end of the last write is its death."""
    tries = (is_killed_while_it_writes(kv / f"block-{number}-{turn}") for turn in range(TRIES))
    assert any(tries), "each write had ended before the kill"


def test_a_write_that_ends_behind_the_close_publishes(kv: Path) -> None:
    """[life-published] The process lives: what its ring wrote is whole."""
    with Stepping(WRITER, "closes_while_writing", kv / "block", str(SIZE)) as writer:
        assert writer.at() == "ready"
        writer.to("closed")
        assert writer.at() == "written"
        until(lambda: state(kv / "block") == "leased", "published", GONE_WAIT_S)
        assert read_file(kv / "block") == b"u" * SIZE
        writer.end()
    until(lambda: state(kv / "block") == "published", "nobody's", GONE_WAIT_S)


def test_a_file_that_is_no_descriptor_is_torn_by_a_kill(kv: Path) -> None:
    """[life-torn] There is no close to look at: a file in a slot of the ring alone."""
    with Stepping(WRITER, "has_no_descriptor", kv / "block", str(SIZE)) as writer:
        assert writer.at() == "half"
        assert state(kv / "block") == "draft"
        writer.kill()
    gone(kv / "block")


def test_a_file_that_is_no_descriptor_is_published(kv: Path) -> None:
    """[life-published] Closed in its slot by a process that lives."""
    with Stepping(WRITER, "has_no_descriptor", kv / "block", str(SIZE)) as writer:
        assert writer.at() == "half"
        writer.to("closed")
        until(lambda: state(kv / "block") == "leased", "published", GONE_WAIT_S)
        assert os.stat(kv / "block").st_size == 2 * SIZE
        writer.end()
