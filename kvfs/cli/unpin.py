"""``kvfs unpin``: let pinned files and directories be evicted again."""

import argparse
from typing import TYPE_CHECKING

from kvfs.cli.arguments import add_match, locate
from kvfs.cli.parser import add_verb
from kvfs.cli.pin import all_pins, ask_for_all, pin_by_job, show
from kvfs.core.errors import UsageError

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "unpin",
        run,
        description="Remove the pin of PATHs; a PATH in a pinned directory becomes an exception to "
        "its pin. With --match, remove the pin\nof each one that matches. With --all remove every "
        "pin of the mount at PATH. Pins of the settings file stay.\nEnds with exit code 20 if "
        "nothing matches.",
        example="kvfs unpin /kv/system-prompts\n  kvfs unpin /kv --match 'lmcache/*@8@*'\n  "
        "kvfs unpin --all /kv",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    add_match(parser)
    parser.add_argument("--all", action="store_true", help="all pins of the mount at PATH")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Remove pins, and print what is still pinned."""
    if args.all and args.match is not None:
        raise UsageError("--all is every pin; leave out --match")
    where = locate(args.paths)
    if args.all or args.match is not None:
        pin_by_job(where, "unpin", args)
    else:
        ask_for_all(where, "unpin")
        show(all_pins(where.socket), as_json=args.json)
    return 0
