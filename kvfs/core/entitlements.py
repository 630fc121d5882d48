"""What is said that tenants may store: by the table ``tenants`` of the settings, and attributes.

The table names a user or a uid, and all uids of its tenant are meant; or a directory at the top of
the mount, ``/NAME``, which is a tenant then. The attributes are of the root directory,
``user.kvfs.quota.UID`` and ``user.kvfs.weight.UID``; and of such a directory ``user.kvfs.quota``,
``user.kvfs.weight`` and ``user.kvfs.tenant``. They win, and ``kvfs quota`` sets them. Pure.
"""

import contextlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvfs.core.account import NO_ENTITLEMENT, Entitlement, TenantId, Tenants
from kvfs.core.directory_policy import NO_NAMES, PREFIX
from kvfs.core.errors import InvalidRequest
from kvfs.core.sizes import parse_size

_HEAVIEST: Final = 1e6
_KEYS: Final = ("quota", "weight")
#: The value of the attribute that overrides a quota of the settings.
NO_QUOTA: Final = b"none"
_TENANT: Final = "tenant"
#: The values of ``user.kvfs.tenant``: whether its directory is one.
IS_TENANT, IS_NO_TENANT = b"1", b"0"


def tenants_table(table: object) -> dict[str, dict[str, str]]:
    """Return the settings file's table ``tenants`` by user, uid or path; raises ValueError.

    ``[tenants.alice]`` or ``[tenants."/team-a"]`` with ``quota = "100G"`` or ``weight = 3``.
    """
    if not isinstance(table, dict):
        raise ValueError("must be a table: write [tenants.USER]")
    found: dict[str, dict[str, str]] = {}
    for name, said in table.items():
        if not isinstance(said, dict):
            raise ValueError(f"{name!r}: write [tenants.USER] with the name or number of a user")
        if unknown := sorted(set(said) - set(_KEYS)):
            raise ValueError(f"{name}: unknown {unknown[0]!r}; use {' or '.join(_KEYS)}")
        if (name := str(name)).startswith("/") and ("/" in name[1:] or name[1:] in NO_NAMES):
            raise ValueError(f"{name!r} is no directory at the top of the mount, such as '/team-a'")
        found[name] = {key: str(value) for key, value in said.items()}
        _entitlement(name, found[name])
    return found


def entitled_directories(table: Mapping[str, Mapping[str, str]]) -> dict[bytes, Entitlement]:
    """Return what *table* (``tenants_table``) says of directories at the top, by their names."""
    return {
        name[1:].encode(errors="surrogateescape"): _entitlement(name, said)
        for name, said in table.items()
        if name.startswith("/")
    }


def entitled(
    table: Mapping[str, Mapping[str, str]], users: Mapping[str, int], tenants: Tenants
) -> tuple[dict[TenantId, Entitlement], list[str]]:
    """Return what *table* (``tenants_table``) says of each user; *users* are uids by name.

    Also a line for each entry that says nothing: of a user that is not there, or a tenant again.
    """
    found: dict[TenantId, Entitlement] = {}
    remarks: list[str] = []
    for name, said in table.items():
        if name.startswith("/"):
            continue
        uid = int(name) if name.isascii() and name.isdigit() else users.get(name)
        if uid is None:
            remarks.append(f"tenants: {name!r} is no user of /etc/passwd; give its uid")
        elif tenants[uid] in found:
            remarks.append(f"tenants: {name!r} is the same tenant as one before (subuid_file)")
        else:
            found[tenants[uid]] = _entitlement(name, said)
    return found, remarks


class Said(NamedTuple):
    """What one attribute says: of a user, or, without a *uid*, of the directory that has it."""

    uid: int | None
    key: str

    @property
    def makes_tenant(self) -> bool:
        """Whether it says that a directory is a tenant, or not."""
        return self.key == _TENANT


_OF_DIRECTORIES: Final = {PREFIX + key.encode(): Said(None, key) for key in (*_KEYS, _TENANT)}


def said_by(name: bytes) -> Said | None:
    """Return which tenant the attribute *name* is about, and what of it; None: about none."""
    if not name.startswith(PREFIX):
        return None
    if (of_directory := _OF_DIRECTORIES.get(name)) is not None:
        return of_directory
    key, _, uid = name.removeprefix(PREFIX).decode("ascii", errors="replace").partition(".")
    return Said(int(uid), key) if key in _KEYS and uid.isdigit() else None


def attribute(said: Said) -> bytes:
    """Return the name of the attribute for *said*."""
    return PREFIX + (said.key if said.uid is None else f"{said.key}.{said.uid}").encode()


def entitled_by(configured: Entitlement, attributes: Mapping[bytes, bytes]) -> Entitlement:
    """Return what a directory with these *attributes* may store; what is no value says nothing."""
    found = configured
    for name, value in attributes.items():
        said = said_by(name)
        if said is not None and said.uid is None and not said.makes_tenant:
            with contextlib.suppress(InvalidRequest):
                found = with_said(found, configured, said.key, value)
    return found


def check_said(said: Said, value: bytes | None) -> None:
    """Raise InvalidRequest unless *value* is one for *said*; None takes it back."""
    if not said.makes_tenant:
        with_said(NO_ENTITLEMENT, NO_ENTITLEMENT, said.key, value)
    elif value not in (IS_TENANT, IS_NO_TENANT, None):
        raise InvalidRequest(f"{said.key}: must be 1 or 0")


def with_said(
    entitled: Entitlement, configured: Entitlement, key: str, value: bytes | None
) -> Entitlement:
    """Return *entitled* with the *value* of an attribute; None: what is *configured* counts again.

    Raises InvalidRequest.
    """
    try:
        if key == "weight":
            weight = configured.weight if value is None else _weight(value.decode())
            return entitled._replace(weight=weight)
        if value is None:
            return entitled._replace(quota_bytes=configured.quota_bytes)
        quota_bytes = None if value == NO_QUOTA else parse_size(value.decode())
        return entitled._replace(quota_bytes=quota_bytes)
    except ValueError as error:
        raise InvalidRequest(f"{key}: {error}") from None


def _entitlement(name: str, said: Mapping[str, str]) -> Entitlement:
    """Return what is *said* of the tenant *name*. Raises ValueError."""
    quota, weight = said.get("quota"), said.get("weight", "1")
    try:
        weight_of = _weight(weight)
    except ValueError as error:
        raise ValueError(f"{name}: weight: {error}") from None
    try:
        return Entitlement(weight_of, None if quota is None else parse_size(quota))
    except ValueError as error:
        raise ValueError(f"{name}: quota: {error}") from None


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
    if not 1 / _HEAVIEST <= weight <= _HEAVIEST:
        raise ValueError(f"{text} is outside 0.000001 .. 1000000")
    return weight
