"""``kvfs status``: what the running servers say about themselves."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.parser import add_verb
from kvfs.cli.servers import answers, status_of
from kvfs.errors import NotMounted
from kvfs.sizes import format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_WIDTH_WITHOUT_TERMINAL: Final = 120


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "status",
        run,
        description="Show the mount at MOUNT, or all mounts. With --json one JSON object for "
        "MOUNT, a list of them without.\nEnds with exit code 11 when nothing is mounted.",
        example="kvfs status /kv --json",
    )
    parser.add_argument("mountpoint", metavar="MOUNT", nargs="?")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answers."""
    if args.mountpoint:
        status = status_of(args.mountpoint)
        _print([status], as_json=args.json, single=True)
        return 0
    found = list(answers())
    served = [answer.status for answer in found if answer.error is None]
    if served or args.json:
        _print(served, as_json=args.json, single=False)
    failed = [answer for answer in found if answer.error is not None]
    for answer in failed:
        print(f"kvfs: {answer.error}", file=sys.stderr)
    if not served:
        # The lines above say more than "nothing is mounted" where there are any.
        if failed and failed[0].error is not None:
            return failed[0].error.exit_code
        raise NotMounted("no kvfs is mounted")
    return 0


def _print(statuses: list[dict[str, Any]], *, as_json: bool, single: bool) -> None:
    if as_json:
        print(json.dumps(statuses[0] if single else statuses, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = Console(width=width, highlight=False, markup=False)
    for status in statuses:
        table = Table(show_header=False, box=None, pad_edge=False, title_justify="left")
        for name, value in status.items():
            table.add_row(name, _shown(name, value))
        console.print(table)


def _shown(name: str, value: object) -> str:
    """Return a value of the status for a reader."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        # The most frequent first: that is what a reader looks for in the counts of requests.
        counts = all(isinstance(count, int) for count in value.values())
        rows = sorted(value.items(), key=lambda row: -row[1]) if counts else list(value.items())
        return ", ".join(f"{key} {_shown(str(key), count)}" for key, count in rows) or "-"
    if isinstance(value, list):
        return "\n".join(_shown(name, item) for item in value) or "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{format_size(value)} ({value})"
    return str(value)
