"""``kvfs status``: the state of the running servers."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from kvfs.cli.failures import one_line
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.servers import answers_and_dead, complaint, not_here, status_of
from kvfs.core.errors import NotMounted
from kvfs.machine.mount_table import kvfs_at

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


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
    found = answers_and_dead()
    served = [answer.status for answer in found if answer.error is None]
    if served or args.json:
        _print(served, as_json=args.json, single=False)
    for status in served:  # its server lives, but its mount is not visible here
        mountpoint = str(status["mountpoint"])
        if kvfs_at(mountpoint) is None and (note := not_here(mountpoint)):
            print(f"kvfs: {note}", file=sys.stderr)
    failed = [answer for answer in found if answer.error is not None]
    for answer in failed:
        print(f"kvfs: {one_line(complaint(answer))}", file=sys.stderr)
    if not served:
        # The lines above, if any, say more than "nothing is mounted".
        if failed and failed[0].error is not None:
            return failed[0].error.exit_code
        raise NotMounted("no kvfs is mounted")
    return 0


def _print(statuses: list[dict[str, Any]], *, as_json: bool, single: bool) -> None:
    if as_json:
        print(json.dumps(statuses[0] if single else statuses, indent=2))
        return
    from kvfs.cli.status_table import tables

    console = console_for_tables()
    for status in statuses:
        for table in tables(status):
            console.print(table)
            console.print()
