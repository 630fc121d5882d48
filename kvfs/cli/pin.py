"""``kvfs pin``: keep files and directories from being evicted."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from kvfs.cli.arguments import locate
from kvfs.cli.parser import add_verb
from kvfs.client.control_socket import ask
from kvfs.core.printable import printable
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "pin",
        run,
        description="Keep files at PATHs, and everything below directories, from being evicted: "
        "the same as\n`setfattr -n user.kvfs.pin -v 1 PATH`. The setting pin_share limits all pins "
        "together.\nShows what was pinned and how much all pins hold; with --list all pins of the "
        "mount at PATH.",
        example="kvfs pin /kv/system-prompts\n  kvfs pin --list /kv",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument("--list", action="store_true", help="show what is pinned; change nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Pin, and print the new pins; or print all pins."""
    where = locate(args.paths)
    if args.list:
        show(all_pins(where.socket), as_json=args.json)
    else:
        show(ask(where.socket, "pin", {"paths": list(where.paths)}), as_json=args.json)
    return 0


def all_pins(socket: str) -> dict[str, Any]:
    """Return all pins of the mount behind *socket*, which come in several replies."""
    pins: dict[str, int] = {}
    after: int | None = 0
    while after is not None:
        told = ask(socket, "pins", {"after": after})
        pins.update(told["pins"])
        after = told.get("next")
    return {"pins": pins, "pinned_bytes": told["pinned_bytes"]}


def show(pinned: dict[str, Any], *, as_json: bool) -> None:
    """Print pins, each with its bytes when it was set, and the sum that all hold now."""
    if as_json:
        print(json.dumps(pinned, indent=2))
        return
    for path, size_bytes in sorted(pinned["pins"].items()):
        print(f"{format_size(size_bytes):>12}  {printable(path)}")
    print(f"{format_size(pinned['pinned_bytes']):>12}  pinned")
