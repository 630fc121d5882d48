"""``kvfs sync``: wait until what is stored now would survive a power loss."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import OnMount, locate, seconds_to
from kvfs.cli.follow import ASK_S, ask_on, progress_bar
from kvfs.cli.parser import add_verb
from kvfs.core.errors import SyncedTooLittle
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_TIMEOUT_S: Final = 600.0
#: A week: what is not durable by then will not be.
_TIMEOUT_MAX_S: Final = 604_800.0


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "sync",
        run,
        description="Wait until every block that is published at PATHs and below them now would "
        "survive a power loss, with its name.\nWhat is still being written is not waited for. Ends "
        "with exit code 25 when that takes longer than --timeout,\nwhen the device fails to write, "
        "or when a process may still write a closed block through a mapping.",
        example="kvfs sync /kv\n  kvfs sync /kv/lmcache --timeout 30",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds_to(_TIMEOUT_MAX_S),
        default=_TIMEOUT_S,
        help=f"wait no longer than that; 0: look once; {_TIMEOUT_S:g} if not given",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask for it, wait, and print how much it was."""
    where = locate(args.paths)
    begun_s = time.monotonic()
    wanted = ask_on(where, "sync", {"paths": list(where.paths)})
    left = _follow(where, wanted, begun_s + args.timeout, quiet=args.json)
    took_s = round(time.monotonic() - begun_s, 3)
    if args.json:
        told = {"blocks": wanted["blocks"], "bytes": wanted["bytes"], "seconds": took_s}
        print(json.dumps({"mountpoint": where.mountpoint, **told, **_rest(left)}, indent=2))
    else:
        blocks = count_of(wanted["blocks"], "block")
        print(f"{blocks}, {format_size(wanted['bytes'])} had to be written; {took_s:.1f} s")
    sys.stdout.flush()
    if not left["done"]:
        # Blocks come first: what is left after the last one is the index.
        what = count_of(left["blocks"], "block") if left["blocks"] else "the names are"
        raise SyncedTooLittle(f"{what} not durable after {args.timeout:g} s")
    if left["held_blocks"]:
        raise SyncedTooLittle(
            f"{count_of(left['held_blocks'], 'block')} not durable: a process has them mapped or "
            "open and may still write them"
        )
    return 0


def _rest(left: dict[str, Any]) -> dict[str, Any]:
    return {"left_blocks": left["blocks"], "held_blocks": left["held_blocks"]}


def _follow(
    where: OnMount, wanted: dict[str, Any], until_s: float, *, quiet: bool
) -> dict[str, Any]:
    """Poll how much is left until nothing is or the time is over; return the last answer."""
    with progress_bar("blocks durable", quiet=quiet, counted=True) as show:
        while True:
            left = ask_on(where, "synced", {"wait": wanted["wait"]})
            if "gone" in left:  # another server has taken over: ask it for a wait of its own
                anew = ask_on(where, "sync", {"paths": list(where.paths)})
                wanted["wait"] = anew["wait"]
                continue
            show(max(0, wanted["blocks"] - left["blocks"]), wanted["blocks"])
            if left["done"] or time.monotonic() >= until_s:
                return left
            time.sleep(ASK_S)
