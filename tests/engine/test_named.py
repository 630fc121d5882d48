"""Walks by name are cut into steps by what they look at, not by how deep the tree is."""

from collections.abc import Iterator

import pytest

from kvfs.core.types import ROOT_INODE
from tests.support.store.stores import Host, host, make_directory, put

LEVELS = 400
WIDE = 600
BY_PATTERN = "**/wanted"


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        yield made


@pytest.mark.parametrize("match", [BY_PATTERN, None])
def test_a_deep_tree_takes_few_steps(running: Host, match: str | None) -> None:
    """Between two steps the server may pause for a tick: one for each level made 22 s of 1,500."""
    at = ROOT_INODE
    for _ in range(LEVELS):
        at = make_directory(running, b"d", at)
    wanted = put(running.store, at, b"wanted", b"x")
    found, steps = running.store.walk(match)
    assert found == {wanted}
    assert 2 <= steps <= LEVELS // 10


@pytest.mark.parametrize("match", [BY_PATTERN, None])
def test_a_wide_directory_takes_several(running: Host, match: str | None) -> None:
    files = {put(running.store, ROOT_INODE, b"%d" % n, b"x") for n in range(WIDE)}
    found, steps = running.store.walk(match)
    assert found == (files if match is None else set())
    assert steps >= WIDE // 256
