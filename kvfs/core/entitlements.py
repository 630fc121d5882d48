"""What the settings say that tenants may store: the table ``tenants``. Pure.

It names a user or a uid; all uids of its tenant are meant.
"""

from collections.abc import Mapping
from typing import Final

from kvfs.core.account import Entitlement, TenantId, Tenants
from kvfs.core.sizes import parse_size

_HEAVIEST: Final = 1e6
_KEYS: Final = ("quota", "weight")


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


def _entitlement(name: str, said: Mapping[str, str]) -> Entitlement:
    """Return what is *said* of the tenant *name*. Raises ValueError."""
    quota, weight = said.get("quota"), said.get("weight", "1")
    try:
        weight_of = float(weight)
    except ValueError:
        raise ValueError(f"{name}: weight: {weight!r} is no number") from None
    if not 1 / _HEAVIEST <= weight_of <= _HEAVIEST:
        raise ValueError(f"{name}: weight: {weight} is outside 0.000001 .. 1000000")
    try:
        return Entitlement(weight_of, None if quota is None else parse_size(quota))
    except ValueError as error:
        raise ValueError(f"{name}: quota: {error}") from None
