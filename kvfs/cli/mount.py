"""``kvfs mount``: serve a pool at a mountpoint, in the background or for systemd."""

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING

from kvfs.cli.failures import need_root
from kvfs.cli.mount_settings import load_settings, settings_to_show
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.subprocesses import supervised

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "mount",
        run,
        description="Serve the pool in SOURCE at MOUNTPOINT. Returns when the mount is ready, and "
        "leaves a server in the background.\nA blank SOURCE is made a pool first; anything else "
        "that is not a pool is refused.\nSettings come from the flags, then from --config or "
        "/etc/kvfs/NAME.toml; --print-settings shows them all.",
        example="kvfs mount /dev/nvme0n1 /kv -o uid=1000,mode=0755",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?")
    parser.add_argument(
        "--capacity", metavar="SIZE", dest="capacity_bytes", help="limit for the data, e.g. 500G"
    )
    parser.add_argument(
        "-o",
        metavar="OPTIONS",
        dest="options",
        action="append",
        default=[],
        help="uid=, gid=, mode= of the root directory; ro",
    )
    parser.add_argument(
        "--foreground", action="store_true", help="stay in the foreground (for systemd)"
    )
    parser.add_argument("--name", help="name of the control socket (default: from MOUNTPOINT)")
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML)")
    parser.add_argument("--log-file", metavar="FILE", help="default: syslog or the journal")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning, error or off")
    parser.add_argument("--fsync", metavar="HOW", help="relaxed (default) or honour")
    parser.add_argument("--data-path", metavar="PATH", help="auto (default), passthrough or daemon")
    parser.add_argument(
        "--guard",
        action=argparse.BooleanOptionalAction,
        help="let nothing be stored in MOUNTPOINT while nothing is mounted there (chattr +i)",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any setting that --print-settings shows",
    )
    parser.add_argument(
        "--print-settings",
        action="store_true",
        help="print every setting and its reason, and exit",
    )
    for flag in ("--template-fd", "--held-fd", "--ready-fd"):
        parser.add_argument(flag, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--started-in", default="", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run as server, template or supervisor; or start these, and return once the mount serves."""
    for name in ("source", "mountpoint", "config", "log_file"):
        if given := getattr(args, name):  # the server runs in /, and reads them again
            setattr(args, name, os.path.abspath(os.path.join(args.started_in, given)))
    if args.print_settings:
        _print_settings(args)
        return 0
    need_root("kvfs mount")
    if args.template_fd is not None or args.held_fd is not None:
        from kvfs.cli.serve import be_template, serve_for
        from kvfs.machine.held_files import SupervisorGone

        load = partial(load_settings, args)
        try:
            if args.template_fd is not None:  # returns in each server
                args.held_fd, args.ready_fd = be_template(load, args.template_fd)
            serve_for(load, args.held_fd, args.ready_fd)
        except SupervisorGone:  # nobody needs us any more
            return 0
    elif args.foreground:
        command, environment = supervised(args.argv, ready_fd=-1)
        os.execve(command[0], command, environment)
    else:
        from kvfs.cli.mount_background import start_in_background

        start_in_background(load_settings(args), args.argv)
    return 0


def _print_settings(args: argparse.Namespace) -> None:
    settings = settings_to_show(args)
    from rich.table import Table

    table = Table("setting", "value", "default", "why", box=None, pad_edge=False)
    for row in settings.table():
        table.add_row(*row)
    console_for_tables(without_terminal=160).print(table)
