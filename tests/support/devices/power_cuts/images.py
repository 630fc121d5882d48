"""A drive as it may be after a power cut, made from a recording.

What was flushed is there, unless the drive lied. Of the writes since the last flush a drive may
have kept any: each mode says which. Images are made in the order of their cuts, so that what is
durable is copied on from one to the next.
"""

import mmap
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tests.support.devices.power_cuts.proving_blocks import SECTOR_BYTES, is_proving
from tests.support.devices.power_cuts.recording import FLUSH, Recording, copy_data, data_of

_LIES_MOST: Final = 12
#: What was written twice lies mostly in this many windows before the cut.
_PAGE_BYTES: Final = 4096
#: How many cuts are in a silence, or among so many requests behind it.
_SILENT_SHARE: Final = 0.4
_BEHIND_OPS: Final = 200


class Mode(StrEnum):
    """Which of the writes since the last flush are there."""

    IN_ORDER = "in order"
    ANY_ORDER = "any order within a flush window"
    DROPPED = "unflushed writes dropped"
    TORN = "torn at a sector"
    TWICE = "the older of two writes kept"
    LYING = "a drive that lies about flushes"


class Cut(NamedTuple):
    """One image: the power goes before request number *end*."""

    number: int
    mode: Mode
    end: int
    seed: int


def draw_cuts(
    recording: Recording, count: int, seed: int, last_ns: int, silences_ns: Sequence[int] = ()
) -> list[Cut]:
    """Return *count* cuts before *last_ns*, of all modes in turn, by their time.

    A share of them is in one of the silences that ended at *silences_ns*, or right behind it.
    """
    draw = random.Random(seed)
    ends = int(np.searchsorted(recording.t_ns, last_ns))
    twice = [int(op) for op in recording.written_twice() if op < ends]
    ends_of_silences = [int(op) for op in np.searchsorted(recording.t_ns, silences_ns)]
    modes = list(Mode)
    cuts = []
    for number in range(count):
        mode = modes[number % len(modes)]
        end = draw.randrange(1, ends)
        if mode is Mode.TWICE and twice:
            # Behind a second write, before the flush that makes it last.
            op = draw.choice(twice)
            flushes = recording.flushes[np.searchsorted(recording.flushes, op) :]
            end = draw.randint(op + 1, int(flushes[0]) if len(flushes) else ends)
        if ends_of_silences and draw.random() < _SILENT_SHARE:
            end = draw.choice(ends_of_silences) + draw.choice((0, draw.randint(1, _BEHIND_OPS)))
            end = min(end, ends)
        cuts.append(Cut(number, mode, end, draw.getrandbits(32)))
    return sorted(cuts, key=lambda cut: cut.end)


class Images:
    """Makes the images of one recording in *place*, one at a time."""

    def __init__(self, recording: Recording, place: Path) -> None:
        self._recording = recording
        self._durable = place / "durable"
        self._done = 0
        self.image = place / "image"
        copy_data(recording.base, self._durable)

    def make(self, cut: Cut) -> Path:
        """Make the image of *cut*, whose end is not before that of the last one."""
        recording = self._recording
        draw = random.Random(cut.seed)
        lies = draw.randint(1, _LIES_MOST) if cut.mode is Mode.LYING else 0
        sure = recording.flushed_before(cut.end, lies)
        # A drive that lied before may have told the truth since: never back behind an image.
        advance = max(self._done, recording.flushed_before(cut.end, _LIES_MOST))
        _apply(self._durable, ((op, 0, None) for op in range(self._done, advance)), recording)
        self._done = advance
        self.image.unlink(missing_ok=True)
        _copy(self._durable, self.image)
        kept = _kept(recording, cut, draw, sure)
        whole = ((op, 0, None) for op in range(advance, sure))
        _apply(self.image, (*whole, *kept), recording)
        return self.image


def _kept(
    recording: Recording, cut: Cut, draw: random.Random, sure: int
) -> Iterator[tuple[int, int, int | None]]:
    """Yield which of the writes behind *sure* are there, each with the part that is."""
    if cut.mode is Mode.DROPPED:
        return
    share = draw.choice((0.2, 0.5, 0.8, 0.95))
    only_data = draw.random() < 0.5
    written = set[int]()
    for op in range(sure, cut.end):
        if recording.offset[op] == FLUSH:
            continue
        length = int(recording.length[op])
        if cut.mode is Mode.TWICE:
            first = int(recording.offset[op]) // _PAGE_BYTES
            pages = set(range(first, first + -(-length // _PAGE_BYTES)))
            if pages & written and draw.random() < 0.7 and is_proving(recording.data(op)):
                continue
            written |= pages
        elif cut.mode is Mode.LYING:
            data = is_proving(recording.data(op))
            if (data or not only_data) and draw.random() > share:
                continue
        elif cut.mode in (Mode.ANY_ORDER, Mode.TORN) and draw.random() > share:
            continue
        if cut.mode is Mode.TORN and draw.random() < 0.3 and (tears := _tears(recording, op)):
            at = draw.choice(tears)
            yield (op, 0, at) if draw.random() < 0.5 else (op, at, None)
            continue
        yield op, 0, None


def _tears(recording: Recording, op: int) -> range:
    """Return where write *op* may be torn: bytes of blocks at a sector, XFS's own at a page.

    XFS does not survive a metadata block that is torn within: the replay of its log believes the
    newer half. Drives write a page of flash at once.
    """
    unit_bytes = SECTOR_BYTES if is_proving(recording.data(op)) else _PAGE_BYTES
    begin = int(recording.offset[op])
    first = (begin // unit_bytes + 1) * unit_bytes
    return range(first - begin, int(recording.length[op]), unit_bytes)


def _apply(path: Path, ops: Iterable[tuple[int, int, int | None]], recording: Recording) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for op, start, end in ops:
            at = int(recording.offset[op])
            if at != FLUSH:
                part = recording.data(op)[start:end]
                memory[at + start : at + start + len(part)] = part


def _copy(path: Path, to: Path) -> None:
    """Copy what a file in memory holds."""
    with path.open("rb") as source, to.open("w+b") as target:
        os.truncate(target.fileno(), os.fstat(source.fileno()).st_size)
        for start, end in data_of(source.fileno()):
            os.lseek(target.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(target.fileno(), source.fileno(), start, end - start)
