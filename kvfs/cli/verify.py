"""``kvfs verify``: compare what the device holds with the checksums of what was stored."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from kvfs.cli.arguments import add_match, locate
from kvfs.cli.follow import follow
from kvfs.cli.parser import add_verb
from kvfs.core.errors import WrongBytes
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "verify",
        run,
        description="Read the blocks at PATHs and below them from the device, and compare them "
        "with the checksums that were made when they were stored.\nA block with other bytes is "
        "dropped, and its extent kept in the quarantine, which `kvfs fsck` lists.\nEnds with exit "
        "code 26 if there was one. Blocks that left memory too early have no checksum.",
        example="kvfs verify /kv\n  kvfs verify /kv --match 'lmcache/*@8@*'",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    add_match(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Start the comparison, follow it, and print what it found."""
    where = locate(args.paths)
    done = follow(where, "verify", {"match": args.match}, _shown, quiet=args.json)
    if args.json:
        told = {key: value for key, value in done.items() if key not in ("job", "done")}
        print(json.dumps({"mountpoint": where.mountpoint, **told}, indent=2))
    else:
        blocks = count_of(done["blocks"], "block")
        print(f"{blocks}, {format_size(done['bytes'])} compared: ", end="")
        print(f"{done['wrong']:,} wrong, {done['without_checksum']:,} more without a checksum")
    if done["wrong"]:
        sys.stdout.flush()
        raise WrongBytes(
            f"{count_of(done['wrong'], 'block')} had other bytes than were stored, and are misses "
            "now; kvfs umount, then kvfs fsck lists what is kept of them"
        )
    return 0


def _shown(state: dict[str, Any], _order: dict[str, Any]) -> tuple[str, int, int | None]:
    """Return the text of the progress bar, how much is done, and out of how much."""
    return f"compared {state['blocks']:,}, wrong {state['wrong']:,}", state["blocks"], None
