"""The device number of a mount, by which NFS-Ganesha knows it: the same again, if it is free."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from kvfs.devices.detached import mount_detached
from mount.fuse import device_number
from mount.fuse.device_number import at_number, remember, remembered
from tests.support.kernel.calls import opened
from tests.support.mounts.mounting import Mounted
from tests.support.mounts.places import blank_place, lines_of, small_mount

pytestmark = pytest.mark.needs_fuse


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


#: Above what others on this machine have, and not that of this test in another run. Each number
#: below costs time, of which a server takes a second at most.
FAR: Final = 120 + os.getpid() % 120
MINOR_MAX: Final = (1 << 20) - 1


def number_of(mount: Mounted) -> int:
    """Return what stat(2) says."""
    return os.minor(os.stat(mount.path).st_dev)


@contextlib.contextmanager
def taken() -> Iterator[int]:
    """Take the lowest free number; yields it."""
    fd = mount_detached("ramfs", "kvfs-test", {}, (), 0)
    try:
        yield os.minor(os.fstat(fd).st_dev)
    finally:
        os.close(fd)


def stopped_at(place: Path, number: int) -> Mounted:
    """Return a mount of *place*'s pool, made and stopped, that had *number* the last time."""
    with small_mount(place) as mount:
        mount.stop()
    (place / "pool" / "DEVICE").write_text(f"{number}\n")
    return small_mount(place)


def told(mount: Mounted) -> tuple[object, object]:
    """Return what the status says of it."""
    status = mount.status()
    return status["device_number"], status["device_number_before"]


def test_a_mount_has_the_same_number_again(place: Path) -> None:
    """[handles-server] Though lower ones are free, and a dead mount had it just now."""
    with stopped_at(place, FAR) as mount:
        for end in (mount.stop, mount.kill_daemon, mount.kill):
            with taken() as lowest:
                assert lowest < FAR
            assert (number_of(mount), told(mount)) == (FAR, (FAR, None))
            end()
            mount.start()
        assert (number_of(mount), told(mount)) == (FAR, (FAR, None))


def test_servers_that_start_at_once_have_theirs_again() -> None:
    """[handles-server] None takes what another one wants."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as starts:
        numbers = [FAR + 2, FAR, FAR + 1]
        mounts = [stopped_at(stack.enter_context(blank_place()), number) for number in numbers]
        for started in [starts.submit(stack.enter_context, mount) for mount in mounts]:
            started.result()
        assert [number_of(mount) for mount in mounts] == numbers


def test_a_number_that_is_taken_is_told(place: Path) -> None:
    """[handles-server] The mount goes on with another one, which is remembered from then on."""
    with contextlib.ExitStack() as stack:
        with at_number(FAR):
            assert stack.enter_context(taken()) == FAR
        mount = stack.enter_context(stopped_at(place, FAR))
        other = number_of(mount)
        assert other != FAR
        assert told(mount) == (other, FAR)
        line = f"device number 0:{other}, not 0:{FAR} as before"
        assert len(lines_of(mount.log_file, line)) == 1
        assert (place / "pool" / "DEVICE").read_text() == f"{other}\n"


@pytest.mark.parametrize("text", [b"", b"x", b"0", b"-3", b"1048576", b"9" * 40, b"5\0"])
def test_a_file_that_says_no_number_asks_for_none(tmp_path: Path, text: bytes) -> None:
    """What is next written to it is a number."""
    (tmp_path / "DEVICE").write_bytes(text)
    with opened(tmp_path, os.O_RDONLY) as pool_fd:
        assert remembered([pool_fd]) is None
        assert remember([pool_fd], 53, None, read_only=False) == (53, None)
        assert remembered([pool_fd]) == 53
        assert os.listdir(pool_fd) == ["DEVICE"]


def test_a_read_only_mount_remembers_nothing(place: Path) -> None:
    """But it asks for the number."""
    with small_mount(place) as mount:
        mount.stop()
        (place / "pool" / "DEVICE").write_text("1\n")
        mount.start("-o", "ro")
        assert told(mount) == (number_of(mount), 1)
        assert (place / "pool" / "DEVICE").read_text() == "1\n"


def test_too_many_numbers_below_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken is given back before the mount, which has a low number then."""
    monkeypatch.setattr(device_number, "_FILLERS_MAX", 40)
    with taken() as before:
        pass
    with at_number(MINOR_MAX), taken() as number:
        assert number < before + 40


def test_the_look_for_a_number_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one may take long on a busy machine."""
    made, moments_s = [], itertools.count(0.0, 0.3)

    def slow(*arguments: object) -> int:
        made.append(arguments)
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(device_number, "mount_detached", slow)
    with monkeypatch.context() as patch:
        patch.setattr(device_number, "time", SimpleNamespace(monotonic=lambda: next(moments_s)))
        with at_number(MINOR_MAX):
            assert 1 <= len(made) <= 3


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMFILE, errno.ENODEV])
def test_a_server_that_may_not_ask_mounts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without the privilege, without descriptors, on a kernel without ramfs."""

    def refused(*_: object) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(device_number, "mount_detached", refused)
    with at_number(MINOR_MAX), taken() as lowest:
        assert lowest > 0
