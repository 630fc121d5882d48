"""The second half of ``kvfs demo``: five times what the pool has room for, and a server killed.

The same requests then go to an XFS of the same size, alone and beside a script that deletes the
oldest blocks, so that what a plain directory does is run and not claimed.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvfs.client.servers import status_of
from kvfs.core.errors import CommandError, ServeFailed
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvfs.bench.overfill import Overfilled

#: When the server is killed and when it is upgraded, as shares of the way.
_KILL_AT: Final = 0.4
_UPGRADE_AT: Final = 0.7
#: Until another server must answer, and between two questions.
_NEXT_SERVER_WAIT_S: Final = 30.0
_ASK_S: Final = 0.05
#: Writers that are killed half-way: every second one writes under a temporary name.
_WRITERS: Final = 4
#: What the script does: it looks each time that this share of the room was stored (every minute,
#: on a drive that is filled in twenty), and deletes the oldest from 90 % down to 80 %.
_LOOK_SHARE: Final = 0.05
#: Beside the room, a journal and what XFS keeps for itself; mkfs.xfs makes none below 300 MiB.
_IMAGE_EXTRA_BYTES: Final = 320 << 20
_IMAGE_SHARE: Final = 1.06
KVFS_SIDE: Final = "kvfs"
_ALONE: Final = "XFS"
_BESIDE_SCRIPT: Final = "XFS and a script"

Say = Callable[[str], None]


class OverfilledSide(NamedTuple):
    """What one side did. ``deleted`` is by the script, None without one."""

    name: str
    counts: "Overfilled"
    #: How many times the room was asked to take new blocks.
    times: float
    halves_left: int
    halves_final: int
    deleted: int | None
    took_s: float


class ServerStory(NamedTuple):
    """What befell the server meanwhile. The longest pause is of any call, None if not known."""

    killed: bool
    upgraded: bool
    longest_pause_s: float | None
    why_not: str = ""


class Bar(NamedTuple):
    """Draws how far a side is."""

    show: Callable[[int, int | None, str], None]
    end_if_told: Callable[[], None]


def image_bytes(room_bytes: int) -> int:
    """Return the size of an image whose XFS has *room_bytes* for blocks."""
    return int(room_bytes * _IMAGE_SHARE) + _IMAGE_EXTRA_BYTES


def on_kvfs(
    mountpoint: Path, seed: int, bar: Bar, say: Say, upgrade: Callable[[], None]
) -> tuple[OverfilledSide, ServerStory]:
    """Fill the pool of *mountpoint* over and over; kill its server on the way, and upgrade it.

    *upgrade* does that. Where the kernel lets no other server take over, neither is done. Raises
    what ``Overfill.run`` raises, and ServeFailed if no server follows.
    """
    status = status_of(str(mountpoint))
    room_bytes = int(status["usable_bytes"])
    can = status["takeover"] == "possible"
    done = {"kill": not can, "upgrade": not can}

    def on_the_way(_: int, share: float) -> None:
        if not done["kill"] and share >= _KILL_AT:
            done["kill"] = True
            _kill_server(mountpoint, say)
        elif not done["upgrade"] and share >= _UPGRADE_AT:
            done["upgrade"] = True
            upgrade()

    with _folder(mountpoint / "overfill") as folder:
        side = _side(KVFS_SIDE, folder, room_bytes, seed, bar, on_the_way)
    if not can:
        return side, ServerStory(False, False, None, str(status["takeover"]))
    pause_s = status_of(str(mountpoint))["longest_pause_s"]
    return side, ServerStory(done["kill"], done["upgrade"], pause_s)


def _kill_server(mountpoint: Path, say: Say) -> None:
    pid = int(status_of(str(mountpoint))["server_pid"])
    say(f"$ kill -9 {pid}   # the server, while four threads store and load")
    os.kill(pid, signal.SIGKILL)
    give_up_s = time.monotonic() + _NEXT_SERVER_WAIT_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(CommandError):
            if (now := int(status_of(str(mountpoint))["server_pid"])) != pid:
                say(f"  process {now} serves on, and no call has failed")
                return
        time.sleep(_ASK_S)
    raise ServeFailed(f"no server followed within {_NEXT_SERVER_WAIT_S:g} s")


def on_plain(place: Path, room_bytes: int, seed: int, bar: Bar) -> list[OverfilledSide]:
    """Send the same requests to a new XFS in *place*, alone and then beside a script.

    Raises BenchFailed if the machine has no loop device for it.
    """
    from kvfs.bench.replay.cleaner import Habits, Script
    from kvfs.bench.replay.trace import Request

    sides = []
    with _xfs(place, room_bytes) as root:
        with _folder(root / "alone") as folder:
            sides.append(_side(_ALONE, folder, room_bytes, seed, bar, lambda *_: None))
        habits = Habits(look_s=_LOOK_SHARE)
        with (
            _folder(root / "cleaned") as folder,
            Script(str(folder), room_bytes, habits, waits=False) as script,
        ):

            def look_when_due(number: int, _: float) -> None:
                from kvfs.bench.overfill import PROMPT_BYTES

                script.before_each(Request(number * PROMPT_BYTES / room_bytes, 0, ()))

            side = _side(_BESIDE_SCRIPT, folder, room_bytes, seed, bar, look_when_due)
            script.finish()
            sides.append(side._replace(deleted=script.deleted))
    return sides


def _side(
    name: str,
    folder: Path,
    room_bytes: int,
    seed: int,
    bar: Bar,
    on_the_way: Callable[[int, float], None],
) -> OverfilledSide:
    from kvfs.bench.killed_writers import halves_left
    from kvfs.bench.overfill import BLOCK_BYTES, PROMPT_BYTES, Overfill

    reached = 0

    def progress(number: int, total: int, share: float) -> None:
        nonlocal reached
        reached = number
        bar.end_if_told()
        on_the_way(number, share)
        stored = format_size(number * PROMPT_BYTES)
        bar.show(number, total, f"{name}: {stored} into {format_size(room_bytes)}")

    load = Overfill(folder, room_bytes, seed=seed, progress=progress)
    load.run()
    names = [f"half-{number}.{'kv' if number % 2 else 'tmp'}" for number in range(_WRITERS)]
    # A full file system has no room for even a half: as after a purge by hand.
    for file in list(folder.glob("prompt-*"))[:_WRITERS]:
        file.unlink()
    left = halves_left([folder / each for each in names], BLOCK_BYTES // 2)
    return OverfilledSide(
        name=name,
        counts=load.counts,
        times=reached * PROMPT_BYTES / room_bytes,
        halves_left=len(left),
        halves_final=sum(file.suffix == ".kv" for file in left),
        deleted=None,
        took_s=load.took_s,
    )


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def _xfs(place: Path, room_bytes: int) -> Iterator[Path]:
    """Yield the root of a new XFS with *room_bytes* for blocks, in an image below *place*."""
    from kvfs.bench.self_made import ballast, loop_device, run_tool, torn_down, unmount

    root = place / "xfs"
    with torn_down() as stack:
        device = stack.enter_context(loop_device(place / "xfs.img", image_bytes(room_bytes)))
        run_tool("mkfs.xfs", "-q", device)
        root.mkdir()
        stack.callback(unmount, str(root))
        run_tool("mount", "-t", "xfs", device, str(root))
        stack.enter_context(ballast(str(root), room_bytes))
        yield root


def as_table(sides: list[OverfilledSide]) -> "Table":
    """Return a column for each side."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("the same requests on", no_wrap=True)
    for side in sides:
        table.add_column(side.name, justify="right", no_wrap=True)
    rows: dict[str, Callable[[OverfilledSide], str]] = {
        "stored, in times of the room": lambda side: f"{side.times:.1f}",
        "asked for again and found": lambda side: f"{100 * _found(side):.0f} %",
        "stores refused (ENOSPC)": lambda side: f"{side.counts.refused:,}",
        "loads lost after a lookup": lambda side: f"{side.counts.lost:,}",
        f"half blocks of {_WRITERS} killed writers": lambda side: str(side.halves_left),
        "seconds": lambda side: f"{side.took_s:.0f}",
    }
    for label, shown in rows.items():
        table.add_row(label, *map(shown, sides))
    return table


def _found(side: OverfilledSide) -> float:
    return side.counts.found / side.counts.asked if side.counts.asked else 0.0


def in_words(sides: list[OverfilledSide], story: ServerStory) -> Iterator[str]:
    """Yield a sentence for each thing that a reader should see."""
    kvfs = sides[0]
    yield (
        f"kvfs took {kvfs.times:.1f} times what it has room for: {_refused(kvfs)}, {_lost(kvfs)}."
    )
    if story.killed:
        waited = (
            ""
            if story.longest_pause_s is None
            else (f" The longest wait of a call was {story.longest_pause_s:.2f} s.")
        )
        yield f"Its server was killed and upgraded meanwhile, and no call failed.{waited}"
    elif story.why_not:
        yield f"Its server was not killed: {story.why_not}."
    for side in sides[1:]:
        beside = "" if side.deleted is None else f", which deleted {side.deleted:,} blocks"
        yield (
            f"{side.name}{beside}: {_refused(side)}, {_lost(side)}, and "
            f"{100 * _found(side):.0f} % of what was asked for again was there, "
            f"{100 * _found(kvfs):.0f} % on kvfs."
        )
    yield (
        f"{_WRITERS} writers were killed half-way: kvfs shows {kvfs.halves_left or 'none'} of "
        "their blocks"
        + "".join(
            f", {side.name} {side.halves_left} halves, {side.halves_final} of them under a final "
            "name, where a lookup finds it"
            for side in sides[1:2]
        )
        + "."
    )


def _refused(side: OverfilledSide) -> str:
    counts = side.counts
    if not counts.refused:
        return "no store was refused"
    return f"{counts.refused:,} of {counts.refused + counts.stored:,} stores got ENOSPC"


def _lost(side: OverfilledSide) -> str:
    lost = side.counts.lost
    return f"{lost:,} loads found gone what a lookup had found" if lost else "no load was lost"


def as_json(sides: list[OverfilledSide], story: ServerStory) -> dict[str, Any]:
    """Return the same as numbers."""
    return {
        "sides": [
            {
                "name": side.name,
                "times": round(side.times, 2),
                **vars(side.counts),
                "halves_left": side.halves_left,
                "halves_final": side.halves_final,
                "deleted": side.deleted,
                "took_s": round(side.took_s, 2),
            }
            for side in sides
        ],
        "server": story._asdict(),
    }
