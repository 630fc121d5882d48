"""``kvfs pin``: files and directories that eviction leaves alone."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from kvfs.cli.on_mount import locate
from kvfs.cli.parser import add_verb
from kvfs.control_client import ask
from kvfs.printable import printable
from kvfs.sizes import format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "pin",
        run,
        description="Keep what is at PATHs, and what lies below a directory, from being evicted: "
        "the same as\n`setfattr -n user.kvfs.pin -v 1 PATH`. All pins together are bounded by the "
        "setting pin_share.\nWith --list show the pins of the mount at PATH.",
        example="kvfs pin /kv/system-prompts\n  kvfs pin --list /kv",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument("--list", action="store_true", help="change nothing, show what is pinned")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask for it, and print what is pinned now."""
    where = locate(args.paths)
    if args.list:
        show(ask(where.socket, "pins"), as_json=args.json)
    else:
        show(ask(where.socket, "pin", {"paths": list(where.paths)}), as_json=args.json)
    return 0


def show(pinned: dict[str, Any], *, as_json: bool) -> None:
    """Print all pins of the mount with the bytes that they held when they were set."""
    if as_json:
        print(json.dumps(pinned, indent=2))
        return
    for path, size_bytes in sorted(pinned["pins"].items()):
        print(f"{format_size(size_bytes):>12}  {printable(path)}")
    print(f"{format_size(pinned['pinned_bytes']):>12}  pinned")
