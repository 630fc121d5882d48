"""Clients that the server cannot see: another pid namespace, where a death looks like a close."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of, stamped, state
from tests.support.clients.stepping import Stepping, until
from tests.support.clients.writers import SIZE, VERSION_SIZE
from tests.support.kernel.calls import read_file, write_file
from tests.support.mounts.foreign import ForeignMount, pid_namespace
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]
WRITER: Final = "tests.support.clients.writers"
#: How long a close waits for its rename here.
CLOSE_S: Final = 1.0
GONE_WAIT_S: Final = 20.0


@pytest.fixture(scope="module")
def holder() -> Iterator[int]:
    skip_without_mounts()
    with pid_namespace() as pid:
        yield pid


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def foreign(request: pytest.FixtureRequest, holder: int) -> Iterator[ForeignMount]:
    """A mount whose server sees pid 0 in every request, on each data path."""
    flags = (f"--data-path={request.param}", "--set", f"foreign_close_s={CLOSE_S}")
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with ForeignMount(source / "pool", directory / "kv", holder, *flags) as mount:
            if request.param == "passthrough":
                require_passthrough(mount)
            yield mount
            mount.stop()
            assert mount.errors() == []


@pytest.fixture
def kv(foreign: ForeignMount, request: pytest.FixtureRequest) -> Path:
    directory = foreign.path / f"{abs(hash(request.node.name)):x}"
    directory.mkdir()
    return directory


def is_gone(path: Path) -> bool:
    return not os.path.exists(path)


def test_a_killed_writer_that_nobody_sees_takes_the_name(kv: Path) -> None:
    """[life-foreign] Its death and a close are the same message."""
    with Stepping(WRITER, "waits", kv / "block") as writer:
        assert writer.at() == "half"
        assert state(kv / "block") == "draft"
        writer.kill()
    until(lambda: is_gone(kv / "block"), "the torn block disappears", GONE_WAIT_S)
    assert os.listdir(kv) == []


def test_a_close_in_place_that_nobody_sees_publishes_nothing(
    kv: Path, foreign: ForeignMount
) -> None:
    """[life-foreign] Whole as it may be."""
    before = foreign.status()["unverified_blocks"]
    write_file(kv / "block", stamped("block", SIZE))
    assert state(kv / "block") == "draft"
    until(lambda: is_gone(kv / "block"), "what nobody vouches for", GONE_WAIT_S)
    assert foreign.status()["unverified_blocks"] == before + 1


def test_a_rename_vouches_for_a_close_that_nobody_saw(kv: Path) -> None:
    """[life-foreign] Whatever the first name was, and with the descriptor open or closed."""
    for name in ("K.tmp", "K-part", "K"):
        write_file(kv / name, stamped("K", SIZE))
        os.rename(kv / name, kv / f"final-{name}")
    fd = os.open(kv / "open", os.O_WRONLY | os.O_CREAT)
    os.write(fd, stamped("K", SIZE))
    os.rename(kv / "open", kv / "final-open")
    os.close(fd)
    finals = ("final-K.tmp", "final-K-part", "final-K", "final-open")
    for name in finals:
        until(lambda name=name: state(kv / name) == "published", f"{name} is final", GONE_WAIT_S)
    # Behind the end of what a close waits for.
    write_file(kv / "marker", b"")
    until(lambda: is_gone(kv / "marker"), "the wait is over", GONE_WAIT_S)
    for name in finals:
        assert read_file(kv / name) == stamped("K", SIZE)


def test_a_temporary_name_waits_for_its_rename_as_long_as_a_lease(kv: Path) -> None:
    """[life-foreign] Nobody reads one: it is a leased block by time."""
    write_file(kv / "K.tmp", stamped("K", SIZE))
    write_file(kv / "marker", b"")
    until(lambda: is_gone(kv / "marker"), "the wait is over", GONE_WAIT_S)
    assert state(kv / "K.tmp") == "leased"
    os.rename(kv / "K.tmp", kv / "K")
    assert read_file(kv / "K") == stamped("K", SIZE)


def test_writing_behind_a_rename_is_not_vouched_for(kv: Path) -> None:
    """[life-foreign] The rename spoke for the bytes that were there."""
    with Stepping(WRITER, "renames_and_goes_on", kv / "block") as writer:
        assert writer.at() == "renamed"
        writer.to("written")
        writer.kill()
    until(lambda: is_gone(kv / "block"), "the torn block disappears", GONE_WAIT_S)


def test_no_short_version_under_writers_that_nobody_sees(kv: Path) -> None:
    """[life-rewrite] Two that truncate one name: a reader sees whole versions, or none."""
    write_file(kv / "K.tmp", stamped("K", VERSION_SIZE))
    os.rename(kv / "K.tmp", kv / "K")
    wrong: list[str] = []
    looks = 0
    finished = threading.Event()

    def look() -> None:
        nonlocal looks
        while not finished.is_set():
            try:
                data = read_file(kv / "K")
            except OSError:
                continue
            looks += 1
            try:
                seed_of(data, "K", VERSION_SIZE)
            except AssertionError as error:
                wrong.append(str(error)[:80])

    looker = threading.Thread(target=look)
    looker.start()
    try:
        with (
            Stepping(WRITER, "truncating", kv / "K", "100") as one,
            Stepping(WRITER, "truncating", kv / "K", "100") as other,
        ):
            for writer in (one, other):
                writer.at()
    finally:
        finished.set()
        looker.join()
    assert looks
    assert wrong == []


def test_who_mounts_in_a_pid_namespace_is_told(foreign: ForeignMount) -> None:
    """[life-foreign] Once, in the log; a server that sees all processes says nothing."""
    assert foreign.log_file.read_text().count("its own pid namespace") == 1
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with Mounted(source / "pool", directory / "kv") as mount:
            assert "pid namespace" not in mount.log_file.read_text()


def test_trusted_closes_publish(holder: int) -> None:
    """[life-foreign] The operator says that no writer dies, and is told at the mount."""
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        flags = ("--set", "foreign_closes=trusted")
        with ForeignMount(source / "pool", directory / "kv", holder, *flags) as mount:
            write_file(mount.path / "block", stamped("block", SIZE))
            until(lambda: state(mount.path / "block") == "leased", "published", GONE_WAIT_S)
            with Stepping(WRITER, "waits", mount.path / "torn") as writer:
                assert writer.at() == "half"
                os.kill(writer.pid, signal.SIGKILL)
            until(lambda: state(mount.path / "torn") == "leased", "published", GONE_WAIT_S)
