"""``kvfs mount``: serve a pool at a mountpoint, in the background or for systemd.

The settings are those of its TOML file, with the flags on top.
"""

import argparse
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvfs.cli.arguments import absolute_key_file, absolute_sources, add_encrypt
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.subprocesses import supervised
from kvfs.client.user_file import read_file
from kvfs.core.errors import UsageError
from kvfs.core.mount_name import check_name, config_path, name_of
from kvfs.core.settings import Settings
from kvfs.core.source_list import is_by_uuid, listed
from kvfs.machine.mount_table import resolve_mountpoint

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: Flags with the name of a setting.
_FLAGS: Final = (
    "source",
    "mountpoint",
    "name",
    "capacity_bytes",
    "encrypt",
    "fsync",
    "data_path",
    "log_file",
    "log_level",
    "guard",
    "all_drives",
)
_MOUNT_OPTIONS: Final = ("uid", "gid", "mode")


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "mount",
        run,
        description="Serve the pool in SOURCE at MOUNTPOINT. Returns when the mount is ready, and "
        "leaves a server in the background.\nA blank SOURCE is made a pool first; anything else "
        "that is not a pool is refused. Of a pool of several drives give all, or one by which the "
        "others are found; UUID=... of the pool finds all.\nSettings come from the flags, then "
        "from --config or /etc/kvfs/NAME.toml; --print-settings shows them all.",
        example="kvfs mount /dev/nvme0n1 /kv -o uid=1000,mode=0755",
    )
    parser.add_argument("sources", metavar="SOURCE", nargs="*")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?")
    parser.add_argument(
        "--capacity", metavar="SIZE", dest="capacity_bytes", help="limit for the data, e.g. 500G"
    )
    add_encrypt(parser)
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
        "--all-drives",
        action=argparse.BooleanOptionalAction,
        help="do not serve while a drive of the pool is missing",
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
    if args.sources[1:]:  # argparse gives them all that it finds
        args.mountpoint = args.sources.pop()
    args.source = listed(absolute_sources(args.sources, args.started_in)) or None
    for name in ("mountpoint", "config", "log_file"):
        if given := getattr(args, name):  # the server runs in /, and reads them again
            setattr(args, name, os.path.abspath(os.path.join(args.started_in, given)))
    args.encrypt = absolute_key_file(args.encrypt, args.started_in)
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


def load_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the command line *args* and of the TOML file it names or implies.

    Paths in *args* are absolute already, and those in the file must be. In the result the
    mountpoint has no symlinks, and the name is set. Raises UsageError.
    """
    settings, path = _given(args)
    if not settings.source or not settings.mountpoint:
        raise UsageError("give SOURCE and MOUNTPOINT (or both in the file of --config)")
    for name in ("source", "mountpoint", "log_file", "metrics_textfile", "index_memory_dir"):
        value = getattr(settings, name)
        if value and not (os.path.isabs(value) or (name == "source" and is_by_uuid(value))):
            raise UsageError(f"{path}: {name}: {value!r} is not an absolute path")
    mountpoint = resolve_mountpoint(settings.mountpoint)
    textfile = settings.metrics_textfile
    if textfile and resolve_mountpoint(textfile).startswith(f"{mountpoint.rstrip('/')}/"):
        # A server that waits for its own mount at its end may wait for ever.
        raise UsageError(f"{path}: metrics_textfile must not lie on the mount itself")
    name = check_name(settings.name or name_of(mountpoint))
    return replace(settings, mountpoint=mountpoint, name=name)


def settings_to_show(args: argparse.Namespace) -> Settings:
    """Return the settings of *args*, which may name neither source nor mountpoint."""
    return load_settings(args) if args.source or args.config else _given(args)[0]


def _given(args: argparse.Namespace) -> tuple[Settings, str]:
    """Return the settings and the path of their file, which must exist if a flag names it."""
    overrides = _overrides(args)
    path = args.config or _implied_config(args)
    text = read_settings_file(path, must_exist=bool(args.config)) if path else ""
    return Settings.from_toml(text, overrides, origin=path), path


def read_settings_file(path: str, *, must_exist: bool) -> str:
    """Return the text of the settings file; empty if it is missing and need not exist.

    Raises UsageError if it cannot be read.
    """
    try:
        return read_file(path).decode()
    except FileNotFoundError:
        if not must_exist:
            return ""
        raise UsageError(f"settings file {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"settings file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"settings file {path}: {error}") from None


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    overrides: dict[str, object] = {}
    for assignment in args.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: write --set NAME=VALUE")
        overrides[key.strip()] = value.strip()
    for option in ",".join(args.options).split(","):
        overrides.update(_mount_option(option))
    for name in _FLAGS:
        if getattr(args, name) is not None:
            overrides[name] = getattr(args, name)
    return overrides


def _mount_option(option: str) -> dict[str, object]:
    if option in ("ro", "rw"):
        return {"read_only": option == "ro"}
    key, equals, value = option.partition("=")
    if equals and key in _MOUNT_OPTIONS:
        return {key: value}
    if not option:
        return {}
    raise UsageError(f"-o {option}: use uid=, gid=, mode=, ro or rw, and --set for other settings")


def _implied_config(args: argparse.Namespace) -> str:
    if args.name:
        return config_path(check_name(args.name))
    return config_path(name_of(resolve_mountpoint(args.mountpoint))) if args.mountpoint else ""
