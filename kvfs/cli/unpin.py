"""``kvfs unpin``: let pinned files and directories be evicted again."""

import argparse
from typing import TYPE_CHECKING

from kvfs.cli.arguments import locate
from kvfs.cli.parser import add_verb
from kvfs.cli.pin import all_pins, show
from kvfs.client.control_socket import ask

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "unpin",
        run,
        description="Remove the pin of PATHs; a PATH in a pinned directory becomes an exception "
        "to its pin.\nWith --all remove every pin of the mount at PATH. Pins of the settings file "
        "stay.",
        example="kvfs unpin /kv/system-prompts\n  kvfs unpin --all /kv",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument("--all", action="store_true", help="all pins of the mount at PATH")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Remove pins, and print what is still pinned."""
    where = locate(args.paths)
    wanted = {"all": True} if args.all else {"paths": list(where.paths)}
    ask(where.socket, "unpin", wanted)
    show(all_pins(where.socket), as_json=args.json)
    return 0
