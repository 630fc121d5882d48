"""What each drive holds: the counts follow any changes, and the first drive has the rest."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.changed import Changed, Why
from kvfs.core.drives import DriveCounts, Numbering
from kvfs.core.inode_rules import blank_record, counted
from kvfs.core.records import Counters, DriveCount, pack_drive_count, parse_drive_count
from kvfs.core.types import ROOT_INODE, DriveNo, InodeNo, InodeRecord

DRIVES = 3


def record(size_bytes: int, *, is_file: bool = True) -> InodeRecord:
    blank = blank_record(ROOT_INODE, b"x", 0o100644 if is_file else 0o040755, 0, 0, 0)
    return blank._replace(allocated_bytes=size_bytes)


CHANGES = st.lists(
    st.lists(
        st.tuples(st.integers(0, DRIVES - 1), st.integers(20, 24), st.integers(0, 1 << 40)),
        min_size=1,
        max_size=3,
    ),
    max_size=20,
)


@given(CHANGES)
def test_counts_follow_every_change(changes: list[list[tuple[int, int, int]]]) -> None:
    """An inode that is there already gets another size, or goes with size 0."""
    numbering = Numbering(DRIVES)
    there: dict[InodeNo, InodeRecord] = {}
    counts, counters = DriveCounts([DriveCount()] * (DRIVES - 1)), Counters()
    for change in changes:
        made: list[Changed] = []
        for drive, serial, size_bytes in change:
            ino = numbering.inode(DriveNo(drive), InodeNo(serial))
            before = there.pop(ino, None)
            after = record(size_bytes) if size_bytes or before is None else None
            made.append(Changed(ino, before, after, Why.CLOSED))
            if before is not None:
                counters = counted(counters, before, -1)
            if after is not None:
                counters, there[ino] = counted(counters, after, 1), after
        unchanged = counts.rows()
        recount = counts.after(made)
        assert counts.rows() == unchanged, "the commit may fail"
        counts.learn(recount)
    anew = DriveCounts([DriveCount()] * (DRIVES - 1))
    for ino, each in there.items():
        anew.count(ino, each)
    assert counts.rows() == anew.rows()
    for drive, count in enumerate(counts.of_all(counters)):
        held = [each for ino, each in there.items() if numbering.drive(ino) == drive]
        assert count == (len(held), sum(each.allocated_bytes for each in held))


def test_directories_count_on_no_drive() -> None:
    counts = DriveCounts([DriveCount()])
    counts.count(Numbering(2).inode(DriveNo(1), InodeNo(20)), record(7, is_file=False))
    assert counts.rows() == {1: DriveCount()}


def test_one_drive_has_all_and_no_row() -> None:
    counts = DriveCounts([])
    assert not counts.several
    assert not counts.rows()
    assert counts.after([Changed(InodeNo(20), None, record(5), Why.CLOSED)]) == {}
    assert counts.of_all(Counters(blocks=2, used_bytes=9)) == [DriveCount(2, 9)]


@given(st.integers(1, 255), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_a_row_is_read_as_it_was_written(drive: int, blocks: int, used_bytes: int) -> None:
    count = DriveCount(blocks, used_bytes)
    row = pack_drive_count(DriveNo(drive), count)
    assert parse_drive_count(DriveNo(drive), row) == count
