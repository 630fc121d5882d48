"""``kvfs quota``: what each tenant stores and may store, and who may store how much."""

import argparse
import json
import os
import pwd
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import locate
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import LEAST_COLUMNS, Column, columns_for_tables, table_lines
from kvfs.client.servers import status_of
from kvfs.core.account import NO_ENTITLEMENT
from kvfs.core.entitlements import NO_QUOTA, Said, attribute, with_said
from kvfs.core.errors import InvalidRequest, NotRoot, UsageError
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_COLUMNS: Final = (
    Column("tenant"),
    *(Column(heading, right=True) for heading in ("stored", "held", "quota", "weight", "share")),
)
#: What takes back what was set: the settings count again.
_AS_SET: Final = "default"


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "quota",
        run,
        description="Show what each tenant of the mount at PATH stores, keeps from eviction, and "
        "may store: its quota, its weight\nbeside others', and the share that others must leave it "
        "in a full pool. With --user, set --quota or --weight of one:\nonly root may, it holds at "
        "once and after restarts, and goes over the settings file. A tenant is a user with the "
        "uids\nthat /etc/subuid lends it.",
        example="kvfs quota /kv\n  kvfs quota /kv --user alice --quota 500G --weight 3\n  "
        "kvfs quota /kv --user alice --quota none --weight default",
    )
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--user", metavar="USER", help="name or uid")
    parser.add_argument(
        "--quota", metavar="SIZE", help="e.g. 500G; none; default: what the settings file says"
    )
    parser.add_argument(
        "--weight", metavar="NUMBER", help="1 for the part that others have; default: as above"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Set what is to be set, and print the tenants."""
    mountpoint = locate([args.path]).mountpoint
    wanted = {key: value for key in ("quota", "weight") if (value := getattr(args, key))}
    if (args.user is None) != (not wanted):
        raise UsageError("--user goes with --quota or --weight")
    if wanted:
        _set(mountpoint, _uid_of(args.user), wanted)
    tenants = status_of(mountpoint)["tenants"]
    if args.json:
        print(json.dumps({"mountpoint": mountpoint, "tenants": tenants}, indent=2))
    else:
        width = columns_for_tables(LEAST_COLUMNS)
        for line in table_lines(_COLUMNS, list(_rows(tenants)), width, stacks=True):
            print(line)
    sys.stdout.flush()
    return 0


def _set(mountpoint: str, uid: int, wanted: Mapping[str, str]) -> None:
    """Set the attributes for what is *wanted*; none if one of them is no value."""
    values: dict[bytes, bytes | None] = {}
    for key, text in wanted.items():
        said, value = Said(uid, key), None if text == _AS_SET else text.encode()
        try:
            with_said(NO_ENTITLEMENT, NO_ENTITLEMENT, key, value)
        except InvalidRequest as error:
            raise UsageError(f"--{error}") from None
        values[attribute(said)] = value
    try:
        for name, value in values.items():
            if value is not None:
                os.setxattr(mountpoint, name, value)
            elif _is_set(mountpoint, name):
                os.removexattr(mountpoint, name)
    except PermissionError:
        raise NotRoot("only root gives out quotas and weights") from None


def _is_set(mountpoint: str, name: bytes) -> bool:
    try:
        os.getxattr(mountpoint, name)
    except OSError:
        return False
    return True


def _uid_of(user: str) -> int:
    """Return the uid of a name or number. Raises UsageError."""
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageError(f"--user: there is no user {user!r} on this machine") from None


def _rows(tenants: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for uid, row in tenants.items():
        quota_bytes = row["quota_bytes"]
        yield (
            _name_of(int(uid)),
            format_size(row["stored_bytes"]),
            format_size(row["held_bytes"]),
            NO_QUOTA.decode() if quota_bytes is None else format_size(quota_bytes),
            f"{row['weight']:g}",
            format_size(row["share_bytes"]),
        )


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
