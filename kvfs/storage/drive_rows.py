"""What the index says of the drives of a pool: a row for each from 1 on (kvfs/core/drives.py)."""

from itertools import chain

from kvfs.core.drives import DriveCounts
from kvfs.core.records import DRIVE_PREFIX, DriveCount, parse_drive_count
from kvfs.core.types import DriveNo
from kvfs.storage.index import Index

_STEP = 64


def read_drive_counts(index: Index, drives: int) -> DriveCounts:
    """Return what each of a pool's *drives* holds, according to *index*. Raises Damaged."""
    others = [DriveCount()] * (drives - 1)
    rows = chain.from_iterable(index.walk(DRIVE_PREFIX, _STEP)) if others else ()
    for key, raw in rows:
        drive = DriveNo(key[-1])
        if 0 < drive < drives:
            others[drive - 1] = parse_drive_count(drive, raw)
    return DriveCounts(others)
