"""The drive's number in an inode number: drive 0 is today's, and age goes by the serial number."""

import pytest

from kvfs.core.drive_numbers import DRIVES_MAX, SERIAL_END, ByDrive, Numbering
from kvfs.core.errors import Damaged
from kvfs.core.types import FIRST_INODE, INODE_END, LAST_INODE, DriveNo, InodeNo


@pytest.mark.parametrize("drive", [0, 1, 7, DRIVES_MAX - 1])
@pytest.mark.parametrize("serial", [FIRST_INODE, 1 << 40, SERIAL_END - 1])
def test_a_number_tells_drive_and_serial(drive: int, serial: int) -> None:
    numbering = Numbering(DRIVES_MAX)
    ino = numbering.inode(DriveNo(drive), InodeNo(serial))
    assert (numbering.drive(ino), numbering.serial(ino)) == (drive, serial)
    assert ino < 1 << 62 < INODE_END, "the list of what is not durable has room for no more"


def test_drive_0_has_the_numbers_of_a_pool_of_one_drive() -> None:
    for drives in (1, 2, DRIVES_MAX):
        assert Numbering(drives).inode(DriveNo(0), FIRST_INODE) == FIRST_INODE


@pytest.mark.parametrize("ino", [FIRST_INODE, SERIAL_END, INODE_END - 1, LAST_INODE])
def test_with_one_drive_all_of_a_number_is_serial(ino: InodeNo) -> None:
    numbering = Numbering(1)
    assert (numbering.drive(ino), numbering.serial(ino)) == (0, ino)


def test_a_thing_is_found_by_the_drive_of_an_inode() -> None:
    numbering, things = Numbering(3), ByDrive(["a", "b", "c"])
    assert [things.of(numbering.inode(DriveNo(at), FIRST_INODE)) for at in range(3)] == [*"abc"]
    assert ByDrive(["only"]).of(LAST_INODE) == "only"


def test_an_inode_of_a_drive_that_the_pool_lacks_is_damage() -> None:
    with pytest.raises(Damaged, match="no such drive"):
        ByDrive(["a", "b"]).of(Numbering(3).inode(DriveNo(2), FIRST_INODE))


def test_more_drives_than_a_number_has_bits_for_are_no_pool() -> None:
    with pytest.raises(AssertionError):
        Numbering(DRIVES_MAX + 1)
