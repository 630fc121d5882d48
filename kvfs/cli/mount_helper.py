"""What mount(8) and umount(8) call for the types kvfs and fuse.kvfs, so that fstab can name a pool.

``mount.kvfs SOURCE DIR [-sfnv] [-o OPTIONS]`` is ``kvfs mount``, ``umount.kvfs DIR [-lfnrv]`` is
``kvfs umount``. Both end with mount(8)'s own exit codes.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Final

from kvfs.cli.main import main as run_command
from kvfs.cli.parser import OneLineParser
from kvfs.cli.standard_streams import say
from kvfs.core.errors import NotRoot, UsageError
from kvfs.core.settings import Settings
from kvfs.core.source_list import by_uuid, is_by_uuid
from kvfs.machine.mount_table import resolve_mountpoint, unmount

#: mount(8), "EXIT STATUS".
MISUSED: Final = 1
FAILED: Final = 32

#: Options of fstab(5) for mount(8) or systemd, or for what kvfs does anyway: nosuid, no atime.
IGNORED: Final = frozenset(
    [
        *("defaults", "rw", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users"),
        *("owner", "group", "async", "atime", "noatime", "relatime", "norelatime", "strictatime"),
        *("nostrictatime", "diratime", "nodiratime", "lazytime", "nolazytime", "nosuid", "nodev"),
        *("exec", "suid", "dev", "nosymfollow", "silent", "loud"),
    ]
)
#: Not for the helpers of mount(8); systemd.mount(5) reads them.
_PREFIXES: Final = ("x-", "X-", "comment=", "uhelper=", "helper=")
#: Options with another name than the setting, or with a flag of their own.
_SHORT: Final = {"capacity": "capacity_bytes"}
_SETTINGS: Final = frozenset(
    declared.name
    for declared in dataclasses.fields(Settings)
    if declared.name not in ("source", "mountpoint", "read_only", "uid", "gid", "mode")
    and "Mapping" not in str(declared.type)
)
_SWITCHES: Final = frozenset(
    declared.name for declared in dataclasses.fields(Settings) if declared.type in (bool, "bool")
)
_MODES: Final = ("uid=", "gid=", "mode=")
#: In front of a source that mount(8) leaves to kvfs.
_OF_KVFS: Final = "kvfs#"
#: One option; a comma inside quotation marks does not end it.
_OPTION: Final = re.compile(r'(?:"[^"]*"|[^,"])+')


def mount_main(argv: Sequence[str] | None = None) -> int:
    """Run as ``mount.kvfs`` with *argv*; return the exit code."""
    try:
        args = mount_parser().parse_args(argv)
        source = source_in_fstab(args.source)
        words = command_of(source, args.directory, args.options, sloppy=args.sloppy)
    except UsageError as error:
        say(f"mount.kvfs: {error}")
        return MISUSED
    if args.fake:
        return 0
    return _told(run_command(words))


def umount_main(argv: Sequence[str] | None = None) -> int:
    """Run as ``umount.kvfs`` with *argv*; return the exit code."""
    try:
        args = umount_parser().parse_args(argv)
    except UsageError as error:
        say(f"umount.kvfs: {error}")
        return MISUSED
    if args.force:  # ends requests that wait for a server, even a dead one
        return _forced(args.directory, lazy=args.lazy)
    return _told(run_command(["umount", args.directory, *(["--lazy"] if args.lazy else [])]))


def mount_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments that mount(8) gives a helper."""
    parser = OneLineParser(
        prog="mount.kvfs",
        description="Serve the pool in SOURCE at DIR, as kvfs mount does. mount(8) calls it for "
        "the types kvfs and fuse.kvfs.",
        epilog="example:\n  mount -t kvfs /dev/nvme0n1 /kv -o capacity=500G,guard",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="drive, image file or directory; UUID=POOL or kvfs#POOL for the UUID of a pool",
    )
    parser.add_argument("directory", metavar="DIR", help="the mountpoint")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="OPTIONS")
    parser.add_argument("-f", dest="fake", action="store_true", help="check the options; no more")
    parser.add_argument("-s", dest="sloppy", action="store_true", help="ignore unknown options")
    _add_idle(parser, ("-n", "-v"))
    return parser


def umount_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments that umount(8) gives a helper."""
    parser = OneLineParser(prog="umount.kvfs", allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("-l", dest="lazy", action="store_true")
    parser.add_argument("-f", dest="force", action="store_true")
    _add_idle(parser, ("-n", "-r", "-v"))
    return parser


def _add_idle(parser: argparse.ArgumentParser, flags: Sequence[str]) -> None:
    """Accept *flags* and others that mount(8) may give and that change nothing here."""
    for flag in flags:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in ("-t", "-N"):
        parser.add_argument(flag, help=argparse.SUPPRESS)


def source_in_fstab(text: str) -> str:
    """Return the SOURCE that *text* of fstab(5) means: as it is, or behind ``kvfs#``.

    mount(8) itself looks for the device of ``UUID=``, and systemd waits for it. What begins with
    ``kvfs#``, as names of FUSE file systems may, comes here as it is.
    """
    if not text.startswith(_OF_KVFS):
        return text
    name = text.removeprefix(_OF_KVFS)
    return name if os.path.isabs(name) or is_by_uuid(name) else by_uuid(name)


def command_of(
    source: str, directory: str, options: Sequence[str], *, sloppy: bool = False
) -> list[str]:
    """Return the command line of ``kvfs`` that does what *options* of fstab(5) say.

    *sloppy* leaves out what is no option of kvfs. Raises UsageError.
    """
    words = ["mount", source, directory]
    for option in _OPTION.findall(",".join(options)):
        name, equals, value = option.replace('"', "").partition("=")
        setting = _SHORT.get(name, name)
        if option == "ro" or (equals and f"{name}=" in _MODES):
            words += ["-o", f"{name}{equals}{value}"]
        elif equals and name == "config":
            words += ["--config", value]
        elif equals and setting in _SETTINGS:
            words += ["--set", f"{setting}={value}"]
        elif setting in _SWITCHES & _SETTINGS:
            words += ["--set", f"{setting}=true"]
        elif name.removeprefix("no") in _SWITCHES & _SETTINGS and not equals:
            words += ["--set", f"{name.removeprefix('no')}=false"]
        elif not (sloppy or name in IGNORED or option.startswith(_PREFIXES)):
            raise UsageError(_unknown(name))
    return words


def _unknown(name: str) -> str:
    if name in ("remount", "bind", "noexec", "sync", "dirsync"):
        return f"a kvfs mount has no option {name}"
    return f"{name} is no option of a kvfs mount; settings are, and mount.kvfs(8) has the others"


def _forced(directory: str, *, lazy: bool) -> int:
    try:
        unmount(resolve_mountpoint(directory), lazy=lazy, force=True)
    except OSError as error:
        say(f"umount.kvfs: {directory}: {error.strerror}")
        return FAILED
    return 0


def _told(exit_code: int) -> int:
    """Return mount(8)'s exit code for one of kvfs's."""
    if exit_code in (0, MISUSED):
        return FAILED if exit_code else 0
    return MISUSED if exit_code in (UsageError.exit_code, NotRoot.exit_code) else FAILED
