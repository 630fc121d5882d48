"""What a killed server keeps of a store: what was renamed, and nothing that was closed by half."""

import os
from collections.abc import Iterator

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import stamped, state
from tests.support.clients.stepping import Stepping
from tests.support.clients.writers import SIZE
from tests.support.kernel.calls import read_file, write_file
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]


@pytest.fixture(params=["daemon", "passthrough"])
def own(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount whose server the test kills."""
    skip_without_mounts()
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with Mounted(source / "pool", directory / "kv", f"--data-path={request.param}") as mount:
            if request.param == "passthrough":
                require_passthrough(mount)
            yield mount


def test_a_flush_in_the_middle_publishes_nothing(own: Mounted) -> None:
    """[killed-daemon] Duplicates were closed, half is written: a FLUSH is no commit."""
    block = own.path / "block"
    with Stepping("tests.support.clients.writers", "duplicates", block) as writer:
        assert writer.at() == "half"
        assert own.requests()["FLUSH"]
        own.kill_daemon()
    own.start()
    assert os.listdir(own.path) == []


def test_what_was_renamed_is_kept_at_any_moment(own: Mounted) -> None:
    """[killed-daemon] The rename has returned, the RELEASE of its writer may be unread."""
    for number in range(5):
        write_file(own.path / "K.tmp", stamped("K", SIZE, number))
        os.rename(own.path / "K.tmp", own.path / f"K-{number}")
        own.kill_daemon()
        own.start()
        for before in range(number + 1):
            assert state(own.path / f"K-{before}") == "published"
            assert read_file(own.path / f"K-{before}") == stamped("K", SIZE, before)
