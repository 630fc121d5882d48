"""Record a load, cut the power at many points of it, check every image, and print a table.

``KVFS_CUTS_SEED`` gives the seed of loads and cuts. What a load writes when is the machine's
business, so the images that fail are kept, as they were before the start, with the ledger.
"""

import contextlib
import logging
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.core.errors import NotMounted
from tests.support.devices.power_cuts.checker import (
    FAULTS,
    Verdict,
    check_mounted_image,
    check_plain_image,
    check_pool_image,
)
from tests.support.devices.power_cuts.hangs import Hangs
from tests.support.devices.power_cuts.images import Cut, Images, Mode, draw_cuts
from tests.support.devices.power_cuts.ledger import Ledger
from tests.support.devices.power_cuts.recording import Recorded, Recording, keep, recorded_drive
from tests.support.devices.power_cuts.takeovers import During, TakeOvers
from tests.support.devices.power_cuts.writer import CutWriter
from tests.support.devices.power_cuts.writing_kernel import Kernel
from tests.support.kernel.caches import pool_root
from tests.support.mounts.mounting import CommandFailed, Mounted, mounted_at, run_kvfs, workplace
from tests.support.mounts.supervised import Supervised

SEED: Final = int(os.environ.get("KVFS_CUTS_SEED", "1"))
DRIVE_BYTES: Final = 400 << 20
#: Small enough that the load fills it.
FULL_BYTES: Final = 5 << 20
STORES_PER_S: Final = 30.0
#: One image of so many is mounted by the real command; a start in this process is cheaper.
_MOUNTED_EVERY: Final = 50
_KEPT_MOST: Final = 3


class Kind(StrEnum):
    """What is recorded."""

    ROOMY = "kvfs"
    FULL = "kvfs, full pool"
    PLAIN = "plain XFS"


@dataclass(slots=True)
class Tally:
    """What was found in the images of one mode."""

    images: int = 0
    bad_images: int = 0
    read: int = 0
    due: int = 0
    lost: int = 0
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        """Count one image."""
        self.images += 1
        self.bad_images += not verdict.is_good
        self.read += verdict.read
        self.due += verdict.due
        self.lost += verdict.lost
        self.refused += bool(verdict.refused)
        self.faults += verdict.faults

    @property
    def is_good(self) -> bool:
        """Whether no image has a fault."""
        return self.bad_images == 0


class Plan(NamedTuple):
    """One recording and its images."""

    kind: Kind
    seed: int
    ways: tuple[str, ...]
    seconds: float
    images: int
    flags: tuple[str, ...] = ()
    #: By how much a block may be late before it counts as lost.
    late_s: float = 0.0
    #: Whether servers are killed and upgraded meanwhile.
    during: During | None = None


@dataclass(slots=True)
class Proof:
    """What the images of one recording are: a tally a mode, and a line for each fault."""

    plan: Plan
    evicted_blocks: int
    #: Blocks that the server says became durable later than the window.
    late_blocks: int
    #: How many servers ended how, and fsyncs that were honoured.
    takeovers: Counter[str] = field(default_factory=Counter)
    fsyncs: int = 0
    #: Calls that were refused because the drive hung.
    refused_calls: int = 0
    tallies: dict[Mode, Tally] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, cut: Cut, verdict: Verdict) -> None:
        """Count the image of *cut*."""
        self.tallies.setdefault(cut.mode, Tally()).add(verdict)
        if not verdict.is_good:
            lines = list(verdict.lines)
            if verdict.refused and cut.mode is not Mode.LYING:  # which may take all of it
                lines.append(verdict.refused)
            self.lines += [f"image {cut.number}, {cut.mode}: {line}" for line in lines]

    def __str__(self) -> str:
        head = f"{self.plan.kind}, seed {self.plan.seed}"
        told = (
            f"{' '.join(self.plan.flags)}; {self.evicted_blocks} evicted, {self.late_blocks} late"
        )
        if self.plan.during is not None:
            ends = ", ".join(f"{count} {how}" for how, count in sorted(self.takeovers.items()))
            told += f"; {ends}, {self.fsyncs} fsyncs, {self.refused_calls} calls refused"
        if self.plan.kind is Kind.PLAIN:
            told = "tmp and rename, without fsync"
        columns = ("images", "blocks", "due", "lost", "refused", *FAULTS)
        lines = [told, f"{head:36}" + "".join(f"{name:>11}" for name in columns)]
        for mode in Mode:
            tally = self.tallies.get(mode, Tally())
            numbers = (tally.images, tally.read, tally.due, tally.lost, tally.refused)
            faults = (tally.faults[name] for name in FAULTS)
            lines.append(f"  {mode:34}" + "".join(f"{n:>11}" for n in (*numbers, *faults)))
        return "\n".join(lines)


def prove(plan: Plan) -> Proof:
    """Record, make the images and check each."""
    with workplace() as place:
        _record(plan, place)
        return _check(plan, place)


def prove_all(plans: Sequence[Plan], processes: int = 2) -> Iterator[Proof]:
    """Prove each in a process of its own, so many at a time.

    Two images of one recording could not be mounted at a time: they are one file system.
    """
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(prove, plans)


def _record(plan: Plan, place: Path) -> None:
    draw = random.Random(plan.seed)
    with recorded_drive(place, DRIVE_BYTES) as drive:
        if plan.kind is Kind.PLAIN:
            ledger = _record_plain(drive, place, draw, plan)
        else:
            full = plan.kind is Kind.FULL
            run_kvfs("mkfs", drive.path, *(("--capacity", str(FULL_BYTES)) if full else ()))
            drive.begin()
            with (
                Supervised(drive.path, place / "kv", *plan.flags) as mount,
                _held_root(mount) as root,
            ):
                kernel = Kernel(draw, root / "LOCK", root / "extents")
                hanging = plan.during is During.HANGING
                writer = CutWriter(mount.path, kernel, draw, plan.ways, hangs=hanging)
                status = mount.status()
                within_s = status["durability"]["within_s"]
                if status["probation"]["room_bytes"]:
                    within_s = 0  # what is in memory is durable once it is on its drive
                writer.ledger.window_s = within_s + plan.late_s if within_s else None
                ends = random.Random(plan.seed)
                hangs = Hangs(drive.drive, mount, kernel, ends)
                takeovers = TakeOvers(
                    mount,
                    ends,
                    fsyncs=plan.during is not During.AGEING,
                    hangs=hangs if hanging else None,
                )
                with contextlib.nullcontext() if plan.during is None else takeovers:
                    writer.run(plan.seconds / 2, STORES_PER_S)
                    if plan.during is not During.AGEING:
                        writer.ledger.synced_ns.append(_sync(mount))
                    writer.run(plan.seconds / 2, STORES_PER_S)
                status = mount.status()
                takeovers.note_server()
                ledger = writer.ledger
                ledger.evicted_blocks = takeovers.counts.pop("evicted")
                ledger.late_blocks = status["durability"]["late"]
                ledger.takeovers = takeovers.counts
                ledger.silences_ns = hangs.silences_ns
                ledger.synced_ns += takeovers.synced_ns
                ledger.fsyncs = len(takeovers.synced_ns)
    ledger.save(place / "ledger")


@contextlib.contextmanager
def _held_root(mount: Mounted) -> Iterator[Path]:
    """Yield a way to the root of the pool that stays when the server ends."""
    fd = os.open(pool_root(mount), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _sync(mount: Mounted) -> tuple[int, int]:
    """Run ``kvfs sync``; return when it began and when it had returned.

    A command may find no server at its start, and says so: then it is run again.
    """
    while True:
        begun_ns = time.monotonic_ns()
        done = run_kvfs("sync", str(mount.path), check=False)
        if done.returncode == 0:
            return begun_ns, time.monotonic_ns()
        if done.returncode != NotMounted.exit_code:
            raise CommandFailed(done.stderr)


def _record_plain(drive: Recorded, place: Path, draw: random.Random, plan: Plan) -> Ledger:
    subprocess.run(["mkfs.xfs", "-q", "-f", "-K", drive.path], check=True, capture_output=True)
    drive.begin()
    with mounted_at(place / "kv", drive.path) as root:
        writer = CutWriter(root, Kernel(draw, root / "log", None), draw, plan.ways)
        writer.run(plan.seconds, STORES_PER_S)
    return writer.ledger


def _check(plan: Plan, place: Path) -> Proof:
    logging.disable(logging.WARNING)  # each start says that the index is rebuilt
    recording = Recording(place / "record")
    ledger = Ledger.load(place / "ledger")
    done = Proof(
        plan,
        ledger.evicted_blocks,
        ledger.late_blocks,
        ledger.takeovers,
        ledger.fsyncs,
        ledger.refused_calls,
    )
    kept = 0
    with workplace() as own:
        images = Images(recording, own)
        ends_ns = [ended for _, ended in ledger.silences_ns]
        last_ns = ledger.listings[-1].at_ns
        for cut in draw_cuts(recording, plan.images, plan.seed, last_ns, ends_ns):
            image = images.make(cut)
            before_ns, behind_ns = recording.t_ns[cut.end - 1 : cut.end + 1]
            cut_ns = ledger.latest_ns(int(before_ns), int(behind_ns))
            if plan.kind is Kind.PLAIN:
                verdict = check_plain_image(image, ledger, cut_ns, own / "mnt")
            elif cut.number % _MOUNTED_EVERY == _MOUNTED_EVERY - 1:
                verdict = check_mounted_image(image, ledger, cut_ns, own / "mnt")
            else:
                verdict = check_pool_image(image, ledger, cut_ns)
            to_keep = plan.kind is not Kind.PLAIN and cut.mode is not Mode.LYING
            if not verdict.is_good and to_keep and kept < _KEPT_MOST:
                kept += 1
                _keep(images, cut, place, verdict)
            done.add(cut, verdict)
    logging.disable(logging.NOTSET)
    return done


def _keep(images: Images, cut: Cut, place: Path, verdict: Verdict) -> None:
    """Keep an image as it was before the start, with what is said of it."""
    directory = Path(tempfile.gettempdir()) / f"kvfs-cuts-seed-{cut.seed}"
    keep(images.make(cut), directory / "image")
    keep(place / "ledger", directory / "ledger")
    (directory / "verdict").write_text("\n".join([str(cut), verdict.refused, *verdict.lines]))
    verdict.lines.append(f"kept in {directory}")
