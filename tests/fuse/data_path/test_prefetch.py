"""Chains on a mount with ``prefetch = learned``: what follows is read while the first is loaded."""

import mmap
import os
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stepping import until
from tests.support.kernel.caches import forget_blocks
from tests.support.mounts.mounting import Mounted, loop_device, run_kvfs, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

DEVICE_BYTES: Final = 400 << 20
BLOCK_BYTES: Final = 1 << 20
COUNT: Final = 8


def content(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


@pytest.fixture(params=["daemon", "passthrough"])
def learning(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount with the blocks of one chain, all of them on the drive."""
    flags = (f"--data-path={request.param}", "--set=prefetch=learned")
    with (
        workplace() as place,
        loop_device(DEVICE_BYTES) as device,
        Mounted(device, place / "kv", *flags) as mounted,
    ):
        if request.param == "passthrough":
            require_passthrough(mounted)
        for number in range(COUNT):
            (mounted.path / "tmp").write_bytes(content(number))
            (mounted.path / "tmp").rename(mounted.path / f"{number}")
        run_kvfs("sync", str(mounted.path))
        yield mounted
        assert mounted.errors() == []


def load_cold(mounted: Mounted, flags: int = 0, looks: int = 0) -> dict[str, Any]:
    """Load the chain from the drive, as its only client; return the figures of `kvfs status`.

    After the first block so many *looks* are taken at the status: what is read ahead gets a start.
    """
    forget_blocks(mounted)
    with mmap.mmap(-1, BLOCK_BYTES) as room:  # aligned, as O_DIRECT needs it
        for number in range(COUNT):
            fd = os.open(mounted.path / f"{number}", os.O_RDONLY | flags)
            try:
                assert os.preadv(fd, [room], 0) == BLOCK_BYTES
            finally:
                os.close(fd)
            assert room[:] == content(number)
            for _ in range(0 if number else looks):
                mounted.status()
    shown: dict[str, Any] = mounted.status()["prefetch"]
    return shown


def test_a_chain_that_was_loaded_before_is_read_ahead(learning: Mounted) -> None:
    """Memory may be short for a while: then it is not."""
    for _ in range(2):
        shown = load_cold(learning)
    assert (shown["links"], shown["read"]) == (COUNT, 0)
    until(lambda: load_cold(learning, looks=10)["used"] >= COUNT, "blocks are used that were read")
    shown = learning.status()["prefetch"]
    assert shown["read"] == shown["used"] + shown["wasted"]
    assert shown["read_bytes"] == shown["read"] * BLOCK_BYTES
    for number in range(COUNT):
        (learning.path / f"{number}").unlink()
    assert learning.status()["prefetch"]["links"] == 0


def test_who_reads_past_the_cache_is_not_read_ahead_of(learning: Mounted) -> None:
    for _ in range(4):
        shown = load_cold(learning, os.O_DIRECT)
    assert set(shown.values()) == {0}
