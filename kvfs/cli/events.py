"""``kvfs events``: print what happens to blocks, a line of JSON for each event."""

import argparse
import json
import socket
import sys
from typing import TYPE_CHECKING

from kvfs.cli.parser import add_verb
from kvfs.client.servers import status_of
from kvfs.core.errors import NotMounted, NotRoot, UsageError
from kvfs.core.mount_name import events_path, name_of
from kvfs.machine.mount_table import resolve_mountpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvfs.cli.parser import Subparsers

#: Lines about the stream itself, not about a block (docs/events.md).
_OF_THE_STREAM = frozenset({"hello", "quiet"})


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "events",
        run,
        description="Print what happens to the blocks of MOUNT from now on, a line of JSON for "
        "each: stored, missing, evicted, removed.\nEnds with the mount, or at Ctrl-C. A program "
        "reads the same lines from /run/kvfs/NAME.events itself.",
        example="kvfs events /kv\n  kvfs events /kv --count 100",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("--count", metavar="N", type=int, help="end after N events")


def run(args: argparse.Namespace) -> int:
    """Print lines until the stream ends."""
    if args.count is not None and args.count < 1:
        raise UsageError("--count must be greater than 0")
    left = args.count
    try:
        for line in _lines(_path(args.mountpoint)):
            if json.loads(line)["event"] in _OF_THE_STREAM:
                continue
            print(line, flush=True)
            if left is not None and (left := left - 1) == 0:
                break
    except KeyboardInterrupt:
        sys.stderr.write("\n")
    return 0


def _path(mountpoint: str) -> str:
    try:
        return events_path(str(status_of(mountpoint)["name"]))
    except NotRoot:  # the events may be for others, too (events_socket_mode)
        return events_path(name_of(resolve_mountpoint(mountpoint)))


def _lines(path: str) -> "Iterator[str]":
    """Yield the lines of the stream at *path*. Raises NotMounted, NotRoot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(path)
        except PermissionError:
            raise NotRoot(f"{path} is for root; see the setting events_socket_mode") from None
        except OSError as error:
            raise NotMounted(f"no events at {path}: {error.strerror}") from None
        with connection.makefile("r", encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield line.rstrip("\n")
