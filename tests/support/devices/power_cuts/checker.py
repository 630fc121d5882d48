"""Start on the image of a drive that lost power, read every block, and judge it by the ledger."""

import errno
import os
import stat
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvfs.core.errors import CommandError, Damaged, DeadInode, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.devices.loop import loop_device
from tests.support.devices.power_cuts.ledger import TEMPORARY, Block, Directory, Ledger
from tests.support.devices.power_cuts.power import Drive
from tests.support.mounts.mounting import CommandFailed, Mounted, mounted_at
from tests.support.store.driven import Driven
from tests.support.store.stores import get, settle

#: Of a pool that is looked at: more than any of them holds, and less than its drive.
_ROOM: Final = "200M"
#: Faults of a block, in the order in which a table shows them.
FAULTS: Final = (
    "another's",
    "first name",
    "mixed",
    "short",
    "empty",
    "zeros",
    "garbled",
    "unreadable",
    "attributes",
)


@dataclass(slots=True)
class Verdict:
    """What was found in one image: counts, and a line for each fault."""

    read: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    due: int = 0
    #: Why there was no start; empty if there was.
    refused: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether everything that was promised holds."""
        return not (self.faults or self.lost or self.refused)


def judge(
    found: dict[str, bytes | None],
    ledger: Ledger,
    cut_ns: int,
    verdict: Verdict,
    *,
    has_aliases: bool = False,
) -> None:
    """Judge the files *found*, by path; None: it could not be read.

    *has_aliases*: what was linked may have its first name, too, or that one alone.
    """
    for path, data in found.items():
        verdict.read += 1
        fault = "unreadable" if data is None else ledger.fault(path, data)
        if data is not None and not has_aliases and ledger.has_first_name(path, data):
            fault = "first name"
        if fault is not None:
            verdict.faults[fault] += 1
            verdict.lines.append(f"{path}, {ledger.way_of(path)}: {fault}")
    read = {path: data for path, data in found.items() if data is not None}
    for block, since in ledger.due(cut_ns):
        verdict.due += 1
        if not ledger.is_there(block, since, read):
            verdict.lost += 1
            publication = block.publications[since]
            age_s = (cut_ns - publication.acknowledged_ns) / 1e9
            verdict.lines.append(
                f"{block.name}, {publication.way}: lost at an age of {age_s:.1f} s"
            )


def check_pool_image(image: Path, ledger: Ledger, cut_ns: int) -> Verdict:
    """Start a store on *image*, as a mount does, read all, sweep, and read all again."""
    with loop_device(0, backing=image) as device:
        verdict = Verdict()
        drive = Drive(Path(device.path), blank=False, memory=image.with_name("index memory"))
        try:
            _check_started(drive.start(), ledger, cut_ns, verdict)
        except CommandError as error:
            verdict.refused = str(error)
        except OSError as error:
            # What lay in a lying drive's cache: XFS shuts down, at once or later.
            if error.errno not in (errno.EUCLEAN, errno.EIO):
                raise
            verdict.refused = f"the XFS is damaged: {error}"
        except Exception as error:  # a request that fails on a mount
            verdict.faults["unreadable"] += 1
            verdict.lines.append("".join(traceback.format_exception(error)[-3:]))
        finally:
            drive.kill()
        return verdict


def _check_started(store: Driven, ledger: Ledger, cut_ns: int, verdict: Verdict) -> None:
    judge(dict(_blocks(store)), ledger, cut_ns, verdict)
    settle(store)
    swept = Verdict()
    judge(dict(_blocks(store)), ledger, cut_ns, swept)
    if (swept.faults, swept.lost) != (verdict.faults, verdict.lost):
        verdict.faults["changed by the sweep"] += 1
        verdict.lines += swept.lines
    _judge_attributes(store, ledger, cut_ns, verdict)


def _judge_attributes(store: Driven, ledger: Ledger, cut_ns: int, verdict: Verdict) -> None:
    """Judge the xattrs, pins and policies of what is there: the old ones or the new ones, whole."""
    pinned = {ino for ino, _ in store.pins()}
    for directory, name in _listed(store, ROOT_INODE):
        of = ledger.directory_at(os.fsdecode(name))
        if of is not None:
            _judge_attribute(store, directory, of, "user.kvfs.ttl", ledger, cut_ns, verdict)
        for ino, block_name in _listed(store, directory):
            block = ledger.block_at(os.fsdecode(name + b"/" + block_name))
            if block is None or block_name.endswith(TEMPORARY.encode()):
                continue
            for attribute in ("user.key", "user.kvfs.pin"):
                _judge_attribute(store, ino, block, attribute, ledger, cut_ns, verdict)
            if (store.xattr_row(ino, b"user.kvfs.pin") == b"1") != (ino in pinned):
                verdict.faults["attributes"] += 1
                verdict.lines.append(f"{block.name}: pinned or not, the index says otherwise")


def _judge_attribute(
    store: Driven,
    ino: InodeNo,
    of: Block | Directory,
    name: str,
    ledger: Ledger,
    cut_ns: int,
    verdict: Verdict,
) -> None:
    ever, due = ledger.values(of, name, cut_ns)
    whose = of.name if isinstance(of, Block) else of.names[0]
    value = store.xattr_row(ino, name.encode())
    if value not in ever:
        verdict.faults["attributes"] += 1
        verdict.lines.append(f"{whose}: {name} is {value!r}")
    elif value not in due:
        verdict.lost += 1
        verdict.lines.append(f"{whose}: {name} is {value!r}, which is older than what is durable")


def check_mounted_image(image: Path, ledger: Ledger, cut_ns: int, mountpoint: Path) -> Verdict:
    """The same by the real command and a mount."""
    verdict = Verdict()
    with loop_device(0, backing=image) as device:
        try:
            # Going back to what was logged may overfill a pool: nothing shall be evicted meanwhile.
            with Mounted(device.path, mountpoint, "--capacity", _ROOM) as mount:
                judge(dict(_files(mount.path)), ledger, cut_ns, verdict)
        except CommandFailed as error:
            verdict.refused = str(error)
    return verdict


def check_plain_image(image: Path, ledger: Ledger, cut_ns: int, mountpoint: Path) -> Verdict:
    """The same on an XFS without kvfs."""
    verdict = Verdict()
    try:
        with mounted_at(mountpoint, "-o", "loop,nouuid", str(image)):
            judge(dict(_files(mountpoint)), ledger, cut_ns, verdict, has_aliases=True)
    except subprocess.CalledProcessError as error:
        verdict.refused = str(error)
    mountpoint.rmdir()
    return verdict


def _blocks(store: Driven, top: InodeNo = ROOT_INODE) -> Iterator[tuple[str, bytes | None]]:
    """Yield the path of each block with its bytes; not what turns out to be a miss."""
    for directory, name in _listed(store, top):
        for _, block in _listed(store, directory):
            try:
                if stat.S_ISREG(store.present(store.lookup(directory, block)).mode):
                    yield os.fsdecode(name + b"/" + block), get(store, directory, block)
            except (NotFound, DeadInode, Damaged):
                continue
            except (OSError, AssertionError):
                yield os.fsdecode(name + b"/" + block), None


def _listed(store: Driven, top: InodeNo) -> Iterator[tuple[InodeNo, bytes]]:
    after = InodeNo(0)
    while rows := store.children(top, after):
        yield from rows
        after = rows[-1][0]


def _files(root: Path) -> Iterator[tuple[str, bytes | None]]:
    for directory in sorted(root.iterdir()):
        if not directory.is_dir():
            continue
        for path in sorted(directory.iterdir()):
            try:
                yield f"{directory.name}/{path.name}", path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError:
                yield f"{directory.name}/{path.name}", None
