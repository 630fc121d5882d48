"""What is said that tenants may store: by the table ``tenants`` of the settings, and attributes.

The table names a user or a uid; all uids of its tenant are meant. The attributes are of the root
directory, ``user.kvfs.quota.UID`` and ``user.kvfs.weight.UID``. They win, and ``kvfs quota`` sets
them. Pure.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvfs.core.account import Entitlement, TenantId, Tenants
from kvfs.core.directory_policy import PREFIX
from kvfs.core.errors import InvalidRequest
from kvfs.core.sizes import parse_size

_HEAVIEST: Final = 1e6
_KEYS: Final = ("quota", "weight")
#: The value of the attribute that overrides a quota of the settings.
NO_QUOTA: Final = b"none"


def tenants_table(table: object) -> dict[str, dict[str, str]]:
    """Return the settings file's table ``tenants`` by user or uid, as text; raises ValueError.

    ``[tenants.alice]`` with ``quota = "100G"`` or ``weight = 3``.
    """
    if not isinstance(table, dict):
        raise ValueError("must be a table: write [tenants.USER]")
    found: dict[str, dict[str, str]] = {}
    for name, said in table.items():
        if not isinstance(said, dict):
            raise ValueError(f"{name!r}: write [tenants.USER] with the name or number of a user")
        if unknown := sorted(set(said) - set(_KEYS)):
            raise ValueError(f"{name}: unknown {unknown[0]!r}; use {' or '.join(_KEYS)}")
        found[str(name)] = {key: str(value) for key, value in said.items()}
        _entitlement(str(name), found[str(name)])
    return found


def entitled(
    table: Mapping[str, Mapping[str, str]], users: Mapping[str, int], tenants: Tenants
) -> tuple[dict[TenantId, Entitlement], list[str]]:
    """Return what *table* (``tenants_table``) says of each tenant; *users* are uids by name.

    Also a line for each entry that says nothing: of a user that is not there, or a tenant again.
    """
    found: dict[TenantId, Entitlement] = {}
    remarks: list[str] = []
    for name, said in table.items():
        uid = int(name) if name.isascii() and name.isdigit() else users.get(name)
        if uid is None:
            remarks.append(f"tenants: {name!r} is no user of /etc/passwd; give its uid")
        elif tenants[uid] in found:
            remarks.append(f"tenants: {name!r} is the same tenant as one before (subuid_file)")
        else:
            found[tenants[uid]] = _entitlement(name, said)
    return found, remarks


class Said(NamedTuple):
    """What one attribute says."""

    uid: int
    key: str


def said_by(name: bytes) -> Said | None:
    """Return which user the attribute *name* is about, and what of it; None: about none."""
    if not name.startswith(PREFIX):
        return None
    key, _, uid = name.removeprefix(PREFIX).decode("ascii", errors="replace").partition(".")
    return Said(int(uid), key) if key in _KEYS and uid.isdigit() else None


def attribute(said: Said) -> bytes:
    """Return the name of the attribute for *said*."""
    return PREFIX + f"{said.key}.{said.uid}".encode()


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
