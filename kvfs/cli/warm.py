"""``kvfs warm``: read blocks into the page cache ahead of their use.

All reads use one buffer; what stays is the kernel's page cache. Names may come from anywhere, so
whatever is not a regular file of a kvfs mount is never opened.
"""

import argparse
import errno
import json
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import below_mount, locate, size_of
from kvfs.cli.follow import progress_bar
from kvfs.cli.parser import add_verb
from kvfs.client.control_socket import ask
from kvfs.core.errors import PathMissing, UsageError
from kvfs.core.shown_names import printable
from kvfs.core.sizes import count_of, format_size
from kvfs.machine.hardware import available_memory_bytes
from kvfs.machine.mount_table import FS_TYPE, mounts

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


_READ_BYTES: Final = 1 << 20
#: Longest burst above the rate.
_BURST_S: Final = 0.1


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "warm",
        run,
        description="Read the files at PATHs, and below directories, so that the next loads come "
        "from memory. A PATH of - is a list on\nstandard input, one path a line. With --hottest, "
        "PATHs are mounts: their most recently used blocks are read, also\nthose used before the "
        "last stop (needs root). Reading counts as a use, so what is warmed is evicted later.\n"
        "Stops at --bytes, by default half of the memory that is available, and reads no faster "
        "than --rate.\nEnds with exit code 20 if nothing was read.",
        example="kvfs warm /kv/system-prompts\n  kvfs warm --hottest /kv --bytes 20G\n  "
        "kvfs warm - < list",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument("--hottest", action="store_true", help="what was used last on the mounts")
    parser.add_argument("--bytes", metavar="SIZE", help="most to read, e.g. 20G")
    parser.add_argument("--rate", metavar="SIZE", default="1G", help="a second (default 1G)")
    parser.add_argument("--dry-run", action="store_true", help="print the paths; read nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read, and print how much."""
    rate_bytes = size_of(args.rate, "--rate") or 0
    limit_bytes = size_of(args.bytes, "--bytes") or (available_memory_bytes() or 0) // 2
    if not limit_bytes:
        raise UsageError("this machine does not tell how much memory is available: give --bytes")
    paths = _hottest(args.paths, limit_bytes) if args.hottest else _named(args.paths)
    if args.dry_run:
        for path in paths:
            print(printable(path))
        return 0
    warming = Warming(kvfs_devices(), limit_bytes, rate_bytes)
    took_s = _read_all(warming, paths, limit_bytes, quiet=args.json)
    _tell(warming, took_s, limit_bytes, as_json=args.json)
    if not warming.blocks:
        sys.stdout.flush()
        raise PathMissing(f"no block at {', '.join(args.paths)} could be read")
    return 0


def _named(paths: list[str]) -> Iterator[str]:
    """Yield the files at *paths*; those on standard input are looked up as they come."""
    for path in paths:
        if path == "-":
            continue
        below_mount(path)
        if not os.path.lexists(path):
            raise PathMissing(f"there is no {printable(path)} on this mount")
    for path in paths:
        for one in _lines() if path == "-" else [path]:
            yield from files_of(one)


def _lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        if path := line.rstrip(b"\n"):
            yield os.fsdecode(path)


def _hottest(mountpoints: list[str], limit_bytes: int) -> Iterator[str]:
    """Yield the paths of the blocks used last, for up to *limit_bytes* in all."""
    told_bytes = 0
    for mountpoint in mountpoints:
        where = locate([mountpoint])
        after: int | None = 0
        while after is not None and told_bytes < limit_bytes:
            told = ask(where.socket, "hottest", {"after": after})
            for path, size_bytes in told["blocks"]:
                if told_bytes >= limit_bytes:
                    break
                told_bytes += size_bytes
                yield f"{where.mountpoint}{path}"
            after = told["next"]


class Warming:
    """Reads files until *limit_bytes* are read, at *rate_bytes* a second or less."""

    def __init__(self, devices: Collection[int], limit_bytes: int, rate_bytes: int) -> None:
        """*devices*: st_dev of the file systems whose files are read."""
        self._devices = devices
        self._limit_bytes = limit_bytes
        self._rate_bytes = rate_bytes
        self._buffer = memoryview(bytearray(_READ_BYTES))
        #: When the first read began, moved later by time that was not used.
        self._begun_s: float | None = None
        self.blocks = 0
        self.bytes = 0
        #: Files that were not read, by reason.
        self.left: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.bytes >= self._limit_bytes

    def read(self, path: str) -> None:
        """Read the file at *path*, or count why not."""
        try:
            found = os.stat(path, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                self.left["not a file"] += 1
            elif found.st_dev not in self._devices:
                self.left["not on this mount"] += 1
            else:
                self._read(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
                self.blocks += 1
        except OSError as error:
            self.left[_reason(error)] += 1

    def _read(self, fd: int) -> None:
        try:
            at = 0
            while not self.is_full and (count := os.preadv(fd, [self._buffer], at)):
                at += count
                self.bytes += count
                self._wait()
        finally:
            os.close(fd)

    def _wait(self) -> None:
        """Sleep while more was read than the rate allows; unused time is worth a burst at most."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()
        due_s = self._begun_s + self.bytes / self._rate_bytes
        ahead_s = due_s - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
        elif ahead_s < -_BURST_S:
            self._begun_s -= ahead_s + _BURST_S


def _read_all(warming: Warming, paths: Iterator[str], limit_bytes: int, *, quiet: bool) -> float:
    """Read each of *paths* until the limit; return the seconds that it took."""
    began_s = time.monotonic()
    with progress_bar("reading", quiet=quiet) as show:
        for path in paths:
            if warming.is_full:
                break
            warming.read(path)
            text = f"{count_of(warming.blocks, 'block')}, {format_size(warming.bytes)}"
            show(warming.bytes, limit_bytes, text)
    return time.monotonic() - began_s


def _tell(warming: Warming, took_s: float, limit_bytes: int, *, as_json: bool) -> None:
    if as_json:
        told: dict[str, Any] = {
            "blocks": warming.blocks,
            "bytes": warming.bytes,
            "left": dict(warming.left),
            "stopped_at_bytes": limit_bytes if warming.is_full else None,
            "took_s": round(took_s, 3),
        }
        print(json.dumps(told, indent=2))
        return
    blocks = count_of(warming.blocks, "block")
    line = f"{blocks}, {format_size(warming.bytes)} read in {took_s:.1f} s"
    if warming.left:
        why = ", ".join(f"{why} {count:,}" for why, count in sorted(warming.left.items()))
        line += f"; {sum(warming.left.values()):,} not: {why}"
    if warming.is_full:
        line += f"; stopped at --bytes {format_size(limit_bytes)}"
    print(line)


def files_of(path: str) -> Iterator[str]:
    """Yield *path*, or each file below it if it is a directory; links are not followed."""
    waiting = [path]
    while waiting:
        at = waiting.pop()
        try:
            if not stat.S_ISDIR(os.stat(at, follow_symlinks=False).st_mode):
                yield at
                continue
            with os.scandir(at) as children:
                for child in children:
                    if child.is_dir(follow_symlinks=False):
                        waiting.append(child.path)
                    else:
                        yield child.path
        except OSError:
            yield at  # reading it tells why


def kvfs_devices() -> set[int]:
    """Return st_dev of every kvfs mount, without asking their servers."""
    found = set[int]()
    for mount in mounts():
        if mount.fs_type == FS_TYPE:
            major, _, minor = mount.device.partition(":")
            found.add(os.makedev(int(major), int(minor)))
    return found


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
        return "gone"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission"
    return error.strerror or str(error)
