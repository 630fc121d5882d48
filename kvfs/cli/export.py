"""``kvfs export``: print or install the configuration with which an NFS server serves a mount."""

import argparse
import json
import os
import shlex
from typing import TYPE_CHECKING

from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.client.nfs.squash import KINDS
from kvfs.core.errors import UsageError
from kvfs.core.shown_names import printable

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers
    from kvfs.client.nfs.export import Removed
    from kvfs.client.nfs.plan import ExportPlan


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "export",
        run,
        description="Print what the configuration of an NFS server must say to serve the mount at "
        "MOUNT to CLIENTs, and the commands\nthat follow. With --write also put it there, in a "
        "file of its own: /etc/exports.d/NAME.exports for the kernel's\nserver, kvfs-NAME.conf "
        "beside ganesha.conf for NFS-Ganesha. What others wrote is never changed. --remove takes\n"
        "the file away again, also when nothing is mounted.",
        example="kvfs export /kv --client 10.0.0.0/24 --write\n  kvfs export /kv --remove",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument(
        "--client",
        metavar="CLIENT",
        action="append",
        default=[],
        help="who may mount it: a host, a network such as 10.0.0.0/24, @NETGROUP, * for everybody; "
        "may be given several times",
    )
    parser.add_argument(
        "--server",
        choices=("nfsd", "ganesha"),
        help="the kernel's NFS server, or NFS-Ganesha (default: the one that runs; nfsd)",
    )
    parser.add_argument(
        "--squash",
        choices=KINDS,
        help="which users of clients are mapped to a user that may store there (default: root, "
        "unless root owns the mount)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="NFS-Ganesha's configuration (default: the one it reads)"
    )
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--remove", action="store_true", help="remove the file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Make the configuration, write it if asked to, and print the next commands."""
    from kvfs.client.nfs.export import plan_of, remove, write

    if args.write and args.remove:
        raise UsageError("--write and --remove exclude each other")
    if args.config:
        args.config = os.path.abspath(args.config)
        if args.server == "nfsd":
            raise UsageError("--config is for NFS-Ganesha only: give --server ganesha")
        args.server = "ganesha"
    if args.remove:
        need_root("kvfs export --remove")
        removed = remove(args.mountpoint, args.server or "", args.config or "")
        _show_removed(removed, as_json=args.json)
        return 0
    if args.write:
        need_root("kvfs export --write")
    plan = plan_of(
        args.mountpoint, args.client, args.server or "", args.squash or "", args.config or ""
    )
    if args.json:
        told = plan._asdict() | {"changed": args.write and write(plan)}
        told |= {"client_mount": plan.client_mount, "client_fstab": plan.client_fstab}
        print(json.dumps(told, indent=2))
    elif args.write:
        print(f"wrote {plan.file}" if write(plan) else f"{plan.file} is up to date")
        _show_rest(plan, plan.next, "")
    else:
        # The whole output is valid as a file of the server's configuration.
        print(f"# {plan.file}", *map(printable, plan.text.splitlines()), sep="\n")
        for file in plan.taken_by:
            print(f"# note: {file} exports {printable(plan.mountpoint)} already")
        _show_rest(plan, (shlex.join(["kvfs", *args.argv, "--write"]), *plan.next), "# ")
    return 0


def _show_rest(plan: "ExportPlan", commands: tuple[str, ...], before: str) -> None:
    for remark in plan.remarks:
        print(f"{before}note: {printable(remark)}")
    for command in commands:
        print(f"{before}next: {printable(command)}")
    print(f"{before}on a client: {printable(plan.client_mount)}")
    print(f"{before}in its /etc/fstab: {printable(plan.client_fstab)}")


def _show_removed(removed: "Removed", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(removed._asdict(), indent=2))
        return
    for file in removed.files:
        print(f"removed {file}")
    if not removed.files:
        print(f"no file of kvfs's exports {printable(removed.mountpoint)}")
    for command in removed.next:
        print(f"next: {printable(command)}")
