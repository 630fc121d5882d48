"""A device that fails to write or to read: what it lost is a miss, and an operator hears of it."""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, mounted_on
from tests.support.devices.failing_drive_program import BAD_PAGE, PAGE_BYTES, Fails
from tests.support.kernel.caches import forget_blocks, forget_pages
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

MIB = 1 << 20
COUNT = 60
#: All of its pages lie on bad sectors.
LOST = (BAD_PAGE + bytes(b"L" * PAGE_BYTES))[:PAGE_BYTES] * 32
WHOLE = b"W" * len(LOST)


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest, drive: FailingDrive) -> Iterator[Mounted]:
    """A pool on the drive."""
    with mounted_on(drive, request.param) as mount:
        yield mount


def store(directory: Path, name: str, data: bytes) -> None:
    (directory / f"{name}.tmp").write_bytes(data)
    os.rename(directory / f"{name}.tmp", directory / name)


def outcome(path: Path, expected: bytes, lost: bytes | None = None) -> str:
    """Return how a load ends: what no promise allows is its own word; *lost* is "zeros"."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return "miss"
    except OSError as error:
        return f"errno {error.errno}"
    if data == lost:
        return "zeros"
    return "whole" if data == expected else "WRONG"


def test_what_could_not_be_written_back_is_a_miss(mounted: Mounted, drive: FailingDrive) -> None:
    """[device-write] New blocks would read as zeros in full length, once their pages are gone."""
    store(mounted.path, "before", WHOLE)
    drive.write_back()
    assert mounted.status()["write_back_failures"] == 0
    drive.fail(writes=Fails.BAD_PAGES)
    for number in range(COUNT):
        store(mounted.path, f"{number}", LOST)
    drive.write_back()
    assert drive.failed() > 0
    until(lambda: mounted.status()["lost_blocks"] >= COUNT, "the blocks are dismissed")
    drive.recover()
    forget_blocks(mounted)
    found = [outcome(mounted.path / f"{number}", LOST) for number in range(COUNT)]
    assert found == ["miss"] * COUNT
    assert mounted.status()["write_back_failures"] > 0
    assert any("failed to write" in line for line in mounted.errors())
    report = run_kvfs("doctor", str(mounted.path), check=False).stdout
    assert "could not be written back" in report
    until(lambda: stored_durably(mounted, "after"), "the drive takes blocks again")
    assert outcome(mounted.path / "after", WHOLE) == "whole"
    mounted.remount()
    assert outcome(mounted.path / "after", WHOLE) == "whole"


def test_until_that_is_found_its_bytes_are_right_or_zeros(
    mounted: Mounted, drive: FailingDrive
) -> None:
    """[device-write] Also for who opens it only then; and when it is found it stays a miss."""
    drive.fail(writes=Fails.BAD_PAGES)
    for number in range(COUNT):
        store(mounted.path, f"{number}", LOST)
    drive.write_back()
    seen: set[str] = set()

    def all_found() -> bool:
        forget_pages_of(mounted)
        for number in range(COUNT):
            seen.add(outcome(mounted.path / f"{number}", LOST, bytes(len(LOST))))
        return bool(mounted.status()["lost_blocks"] >= COUNT)

    until(all_found, "the blocks are dismissed")
    assert seen <= {"whole", "zeros", "miss", f"errno {errno.ESTALE}"}
    found = [outcome(mounted.path / f"{number}", LOST) for number in range(COUNT)]
    assert found == ["miss"] * COUNT


def forget_pages_of(mounted: Mounted) -> None:
    """Let the kernel drop what it needs not keep, as it does when it needs the memory."""
    with suppress(AssertionError):  # no extent is left
        forget_blocks(mounted)


def stored_durably(mounted: Mounted, name: str) -> bool:
    """Store a block; whether it is durable. A look may drop it yet, for the errors before."""
    store(mounted.path, name, WHOLE)
    return run_kvfs("sync", str(mounted.path), check=False).returncode == 0


def test_a_draft_whose_bytes_were_lost_is_never_published(
    mounted: Mounted, drive: FailingDrive
) -> None:
    """[device-write] Its writer hears of it when it renames: the store is refused."""
    drive.fail(writes=Fails.BAD_PAGES)
    with (mounted.path / "draft.tmp").open("wb", buffering=0) as file:
        file.write(LOST)
        drive.write_back()
        until(lambda: mounted.status()["lost_blocks"] >= 1, "the draft is dismissed")
        file.write(WHOLE)
        with pytest.raises(FileNotFoundError):
            os.rename(mounted.path / "draft.tmp", mounted.path / "final")
    assert os.listdir(mounted.path) == []


def test_what_cannot_be_read_is_an_error_once_and_a_miss_from_then_on(
    mounted: Mounted, drive: FailingDrive
) -> None:
    """[device-read] An EIO on a name that stays would keep its block from being made anew."""
    for number in range(COUNT):
        store(mounted.path, f"{number}", LOST)
    store(mounted.path, "good", WHOLE)
    drive.write_back()
    forget_blocks(mounted)
    drive.fail(reads=Fails.BAD_PAGES)
    first = [outcome(mounted.path / f"{number}", LOST) for number in range(COUNT)]
    assert set(first) <= {"errno 5", "errno 116", "miss"}
    assert "errno 5" in first

    def all_dismissed() -> bool:
        # Loads go on, as a client's do: of many errors the kernel's log has a few, and none for
        # five seconds where another test's drive has used them up.
        for number in range(COUNT):
            outcome(mounted.path / f"{number}", LOST)
        return bool(mounted.status()["lost_blocks"] == COUNT)

    until(all_dismissed, "all of them are dismissed")
    found = [outcome(mounted.path / f"{number}", LOST) for number in range(COUNT)]
    assert found == ["miss"] * COUNT
    assert outcome(mounted.path / "good", WHOLE) == "whole"
    store(mounted.path, "0", WHOLE)
    assert outcome(mounted.path / "0", WHOLE) == "whole"


def test_a_reader_that_had_it_open_long_before_finds_out_for_all(
    mounted: Mounted, drive: FailingDrive
) -> None:
    """[device-read] Its open was long ago, and others opened since."""
    store(mounted.path, "a", LOST)
    for number in range(COUNT):
        store(mounted.path, f"{number}", WHOLE)
    with (mounted.path / "a").open("rb", buffering=0) as file:
        drive.write_back()
        forget_blocks(mounted)
        forget_pages(file.fileno())
        drive.fail(reads=Fails.BAD_PAGES)

        def dismissed() -> bool:
            with suppress(OSError):
                os.pread(file.fileno(), 4096, 0)  # again: see above
            return bool(mounted.status()["lost_blocks"] == 1)

        until(dismissed, "it is dismissed")
        # The kernel is told by a thread: until then it may open by the name that it knows.
        until(lambda: outcome(mounted.path / "a", LOST) == "miss", "it is a miss")
