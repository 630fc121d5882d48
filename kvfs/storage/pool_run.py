"""One run of a pool: what the RUNs of its drives say together, and what a server writes there.

Each drive has a RUN, which says of which run it is, by a number that grows. One that is of another
run was away while the others were served, or failed meanwhile: then nothing is trusted. The latest
run counts. So any drive may be missing, and none is believed that was.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from kvfs.core.types import DriveNo, InodeNo
from kvfs.storage.run_state import (
    RunState,
    distrust,
    never_ran,
    present_boot_id,
    run_stamp,
    stated,
    write_run_state,
)
from kvfs.storage.syscalls import Syscalls

_RUN_BYTES: Final = 8
_log: Final = logging.getLogger(__name__)


class RunPlace(NamedTuple):
    """A drive that has a RUN: its directory.

    ``superblock`` identifies the file system that a directory is on now (devices/directory.py); it
    is empty if the file system's log was checked instead.
    """

    drive: DriveNo
    pool_fd: int
    superblock: str


def read_pool_run(places: Sequence[RunPlace], syscalls: Syscalls) -> RunState:
    """Return what the RUNs of a pool's drives say together. Raises OSError.

    A clean stop writes them when all is on the drives, so one that says so is right for its run.
    """
    return _together(places, _all_stated(places, syscalls), syscalls)


def _together(
    places: Sequence[RunPlace], found: Sequence[RunState | None], syscalls: Syscalls
) -> RunState:
    """Return what the RUNs *found* at *places* say together. Raises OSError."""
    if not places[1:]:
        return found[0] or RunState("", clean=never_ran(places[0].pool_fd, syscalls))
    said = [state for state in found if state is not None]
    if not said:
        return RunState("", clean=all(never_ran(place.pool_fd, syscalls) for place in places))
    runs = {state.run for state in said}
    lost = _lost_in_latest(said)
    #: The version before wrote one RUN, which says nothing of its run, on the first drive.
    is_one = len(runs) == 1 and (runs == {""} or len(said) == len(found))
    is_one = is_one and not any(place.drive in lost for place in places)
    is_clean = is_one and any(state.clean for state in said)
    here = _of_latest(places, found)
    there = [
        state
        for place, state in zip(places, found, strict=True)
        if state is not None and place in here
    ] or [_latest(said)]
    best = max(there, key=lambda state: (state.clean == is_clean, state.of_this_boot))
    moved = any(state.moved for state in said)
    return best._replace(
        clean=is_clean,
        copied=not is_one or any(state.copied for state in said),
        moved=moved,
        doubtful_below=max(state.doubtful_below for state in said),
        logged=best.logged if is_clean and not moved else 0,
        index_dir="" if moved else best.index_dir,
        number=max(state.number for state in said),
        lost=tuple(sorted(lost)),
    )


def stale_drives(places: Sequence[RunPlace], syscalls: Syscalls) -> frozenset[DriveNo]:
    """Return the drives that were away while the others were served. Raises OSError.

    Those are not of the latest run, or say that they were not swept since.
    """
    return _stale_of(places, _all_stated(places, syscalls))


def _stale_of(places: Sequence[RunPlace], found: Sequence[RunState | None]) -> frozenset[DriveNo]:
    here = {place.drive for place in _of_latest(places, found)}
    return frozenset(
        place.drive
        for place, state in zip(places, found, strict=True)
        if places[1:] and state is not None and (state.stale or place.drive not in here)
    )


def latest_places(places: Sequence[RunPlace], syscalls: Syscalls) -> list[RunPlace]:
    """Return those of *places* that are of the latest run: its log is there. Raises OSError."""
    return _of_latest(places, _all_stated(places, syscalls)) if places[1:] else list(places)


def _all_stated(places: Sequence[RunPlace], syscalls: Syscalls) -> list[RunState | None]:
    return [stated(place.pool_fd, syscalls, place.superblock) for place in places]


def _of_latest(places: Sequence[RunPlace], found: Sequence[RunState | None]) -> list[RunPlace]:
    """Return those of *places*, with the RUNs *found*, that are of the latest run.

    None of them failed while it went on. One without a RUN has not run yet.
    """
    said = [state for state in found if state is not None]
    if not said:
        return list(places)
    latest, lost = _latest(said), _lost_in_latest(said)
    return [
        place
        for place, state in zip(places, found, strict=True)
        if state is None or (state.run == latest.run and place.drive not in lost)
    ] or list(places)


def _latest(said: Sequence[RunState]) -> RunState:
    """Return a RUN of the latest run.

    The version before had no numbers, and always the first drive.
    """
    return max(said, key=lambda state: state.number)


def _lost_in_latest(said: Sequence[RunState]) -> frozenset[int]:
    """Return the drives that were lost in the latest run, as any of its drives *said*."""
    latest = _latest(said)
    return frozenset(drive for one in said if one.run == latest.run for drive in one.lost)


def new_run(drives: Collection[object], former: RunState) -> tuple[str, int]:
    """Return what a run of a pool with *drives* calls itself, and its number, after the *former*.

    The number is a time in ms if the clock was not set back, so that of two runs on different
    drives of one pool the later has the higher one. A pool of one drive has none.
    """
    number = max(former.number + 1, time.time_ns() // 1_000_000)
    return (secrets.token_hex(_RUN_BYTES), number) if len(drives) > 1 else ("", 0)


def on_each(
    places: Sequence[RunPlace], do: Callable[[RunPlace], None], *, all_of_them: bool
) -> None:
    """Call *do* for each of *places*, whatever it raises.

    Raises an OSError that it raised if *all_of_them* must go well, or if none did.
    """
    errors: list[OSError] = []
    for place in places:
        try:
            do(place)
        except OSError as error:
            errors.append(error)
            _log.warning("drive %d: RUN is as it was: %s", place.drive, error)
    if errors and (all_of_them or len(errors) == len(places)):
        raise errors[0]


class PoolRun:
    """One run of a pool, from its start to its stop. Until a clean stop RUN says not clean."""

    def __init__(
        self,
        places: Sequence[RunPlace],
        syscalls: Syscalls,
        end: InodeNo,
        index_dir: str,
        lost: Collection[DriveNo] = (),
        missing: Collection[DriveNo] = (),
    ) -> None:
        """Read how the last run ended; all inodes have numbers below *end*. Raises OSError.

        *places* have a RUN, but for those *lost*, which have failed since; others are *missing*.
        *index_dir* is that of the index in memory, empty if it is in the pool. If the index is not
        trusted, any of the pool's blocks may have lost bytes.
        """
        self._all_places = places
        self._lost, self._missing = lost, frozenset[int](missing)
        #: RUN of a drive is written by several threads.
        self._writing = {place.drive: threading.Lock() for place in places}
        self._is_stopped = False
        self._syscalls = syscalls
        self._index_dir = index_dir
        found = _all_stated(places, syscalls)
        self._former = former = _together(places, found, syscalls)
        #: The drives that were away in the last run: no file there is believed that the index does
        #: not know. They stay so until they were swept (``believe``).
        self.stale = _stale_of(places, found)
        #: Those of them that have a log of the index from before that.
        latest = {place.drive for place in _of_latest(places, found)}
        self.outdated = frozenset(place.drive for place in places if place.drive not in latest)
        self._run, self._number = new_run([*places, *missing], former)
        self.stamp = run_stamp(places[0].pool_fd, syscalls)
        #: Whether the pool ran last in this boot; makers from another boot are dead.
        self.same_boot = former.of_this_boot
        #: See ``RunState.doubtful_below``.
        self.doubtful_below = former.doubtful_below if former.trusted else end
        #: The base of the age clock, if the last run was in this boot.
        self.age_base_ns = former.present_age_base_ns

    @property
    def _places(self) -> list[RunPlace]:
        return [place for place in self._all_places if place.drive not in self._lost]

    def believe(self, age_base_ns: int) -> None:
        """Write RUN on the stale drives, which have been swept: they are as the others now.

        Raises OSError.
        """
        stale, self.stale = self.stale, frozenset()
        places = [place for place in self._places if place.drive in stale]
        if places:
            self._write(places, age_base_ns, clean=False)

    def begin(self, age_base_ns: int, *, follows: bool) -> None:
        """Write RUN: the pool runs. Raises OSError.

        A server that *follows* the one that wrote RUN, and has its tables, leaves a RUN that says
        the same. The last one made it durable before it served, and a drive that answers nothing
        now would keep this one from serving.
        """
        if follows:
            self._run, self._number = self._former.run, self._former.number
            self._missing |= set(self._former.lost)  # they were there when it began
        present = RunState(
            present_boot_id(),
            clean=False,
            doubtful_below=self.doubtful_below,
            age_base_ns=age_base_ns,
            index_dir=self._index_dir,
            run=self._run,
            number=self._number if self._run else 0,
            lost=self._lost_now(),
        )
        if not follows or self._former != present:
            # On all of them: one that still said clean would be believed, were it alone some day.
            self.write(age_base_ns, clean=False)

    def _lost_now(self) -> tuple[int, ...]:
        """Return the drives without which the run goes on; none in a pool of one."""
        return tuple(sorted(self._missing.union(self._lost))) if self._run else ()

    def note_lost(self, drive: DriveNo, age_base_ns: int) -> None:
        """Have RUN on *drive* say which drives are lost, so that none is believed; in any thread.

        After the stop it does nothing. Raises OSError.
        """
        places = [place for place in self._places if place.drive == drive]
        if places and not self._is_stopped:
            self._write(places, age_base_ns, clean=False)
        if self._places and self._places[0].drive == drive:
            self.stamp = run_stamp(self._places[0].pool_fd, self._syscalls)

    def write(
        self, age_base_ns: int, *, clean: bool, strays: bool = False, logged: int = 0
    ) -> None:
        """Write RUN: whether the run stopped cleanly, and left *strays*. Raises OSError.

        *age_base_ns* is the base of the age clock in this boot, *logged* the batch that leads to
        the index as it is.
        """
        self._is_stopped |= clean
        self._write(self._places, age_base_ns, clean=clean, strays=strays, logged=logged)
        self.stamp = run_stamp(self._places[0].pool_fd, self._syscalls)

    def _write(
        self,
        places: Sequence[RunPlace],
        age_base_ns: int,
        *,
        clean: bool,
        strays: bool = False,
        logged: int = 0,
    ) -> None:
        def write(place: RunPlace) -> None:
            with self._writing[place.drive]:
                write_run_state(
                    place.pool_fd,
                    self._syscalls,
                    clean=clean,
                    strays=strays,
                    superblock=place.superblock,
                    doubtful_below=self.doubtful_below,
                    age_base_ns=age_base_ns,
                    logged=logged,
                    index_dir="" if clean else self._index_dir,
                    run=self._run,
                    number=self._number,
                    stale=place.drive in self.stale,
                    lost=self._lost_now(),
                )

        on_each(places, write, all_of_them=not clean)

    def distrust(self) -> None:
        """Make sure that the next start does not trust the index. Raises OSError."""
        distrust_index(self._places, self._syscalls)


def distrust_index(places: Sequence[RunPlace], syscalls: Syscalls) -> None:
    """Make sure that the next start does not trust the index, unless the pool was stopped cleanly.

    For when the page cache cannot be trusted: a sync failed, or the file system was cut off.
    Raises OSError.
    """
    if read_pool_run(places, syscalls).clean:
        return
    on_each(
        places,
        lambda place: distrust(place.pool_fd, place.superblock, syscalls),
        all_of_them=True,
    )
