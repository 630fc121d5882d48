"""``kvfs destroy``: remove a pool with every block in it."""

import argparse
import sys
from typing import TYPE_CHECKING

from kvfs.cli.arguments import wanted_pool
from kvfs.cli.caller import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import UsageError

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "destroy",
        run,
        description="Remove the pool in SOURCE. A SOURCE that is not a pool, or is mounted, is "
        "refused and left as it is.",
        example="kvfs destroy /dev/nvme0n1 --yes",
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Ask, then remove."""
    need_root("kvfs destroy")
    if not args.yes and not _confirmed(args.source):
        print("nothing was changed", file=sys.stderr)
        return 1
    from kvfs.devices import destroy_source

    with wanted_pool(args.source):
        destroy_source(args.source)
    return 0


def _confirmed(source: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("destroy asks before it removes; without a terminal, give --yes")
    print(f"Remove the pool in {source} with every block in it? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
