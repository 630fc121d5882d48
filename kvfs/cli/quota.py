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
from kvfs.core.directory_policy import TENANT
from kvfs.core.entitlements import IS_TENANT, NO_QUOTA, Said, attribute, check_said
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
        "in a full pool. With --user or --directory, set --quota or\n--weight of one: only root "
        "may, it holds at once and after restarts, and goes over the settings file. A tenant is a\n"
        "user with the uids that /etc/subuid lends it, or a directory at the top of the mount.",
        example="kvfs quota /kv\n  kvfs quota /kv --user alice --quota 500G --weight 3\n  "
        "kvfs quota /kv --user alice --quota none --weight default\n  "
        "kvfs quota /kv --directory team-a --quota 2T",
    )
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--user", metavar="USER", help="name or uid")
    parser.add_argument(
        "--directory", metavar="NAME", help="at the top of the mount; it becomes a tenant"
    )
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
    named = [each for each in (args.user, args.directory) if each is not None]
    if len(named) != bool(wanted):
        raise UsageError("--user or --directory goes with --quota or --weight")
    if args.user is not None:
        _set(mountpoint, _values(_uid_of(args.user), wanted))
    elif args.directory is not None:
        _set(_directory_of(mountpoint, args.directory), _values(None, wanted))
    tenants = status_of(mountpoint)["tenants"]
    if args.json:
        print(json.dumps({"mountpoint": mountpoint, "tenants": tenants}, indent=2))
    else:
        for line in tenant_lines(tenants, columns_for_tables(LEAST_COLUMNS)):
            print(line)
    sys.stdout.flush()
    return 0


def _values(uid: int | None, wanted: Mapping[str, str]) -> dict[bytes, bytes | None]:
    """Return the attributes for what is *wanted*, None: to be removed. Raises UsageError.

    Without a *uid* they are those of a directory, which becomes a tenant.
    """
    values: dict[bytes, bytes | None] = {} if uid is not None else {TENANT: IS_TENANT}
    for key, text in wanted.items():
        said, value = Said(uid, key), None if text == _AS_SET else text.encode()
        try:
            check_said(said, value)
        except InvalidRequest as error:
            raise UsageError(f"--{error}") from None
        values[attribute(said)] = value
    return values


def _set(directory: str, values: Mapping[bytes, bytes | None]) -> None:
    """Give *directory* these attributes."""
    try:
        for name, value in values.items():
            if value is not None:
                os.setxattr(directory, name, value)
            elif _is_set(directory, name):
                os.removexattr(directory, name)
    except PermissionError:
        raise NotRoot("only root gives out quotas and weights") from None


def _is_set(directory: str, name: bytes) -> bool:
    try:
        os.getxattr(directory, name)
    except OSError:
        return False
    return True


def _directory_of(mountpoint: str, name: str) -> str:
    """Return the path of directory *name* at the top of the mount. Raises UsageError."""
    path = os.path.join(mountpoint, name.strip("/"))
    is_top = os.path.dirname(path) == mountpoint and os.path.basename(path) not in (".", "..")
    if not is_top or os.path.islink(path) or not os.path.isdir(path):
        raise UsageError(f"--directory: {name!r} is no directory at the top of {mountpoint}")
    return path


def _uid_of(user: str) -> int:
    """Return the uid of a name or number. Raises UsageError."""
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageError(f"--user: there is no user {user!r} on this machine") from None


def tenant_lines(tenants: Mapping[str, Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield a table of *tenants*, as in `kvfs status`, headings first."""
    return table_lines(_COLUMNS, list(_rows(tenants)), width, stacks=True)


def _rows(tenants: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for tenant, row in tenants.items():
        quota_bytes = row["quota_bytes"]
        yield (
            tenant if tenant.startswith("/") else _name_of(int(tenant)),
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
