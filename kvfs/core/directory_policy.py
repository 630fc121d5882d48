"""The policies that a directory can have, and the values of each."""

from typing import Final, NamedTuple

from kvfs.core.errors import InvalidRequest
from kvfs.core.hints import BlockHint, hint_of
from kvfs.core.sizes import parse_age
from kvfs.core.types import NO_INODE, InodeNo

DRAFTS: Final = b"user.kvfs.drafts"
EVICT: Final = b"user.kvfs.evict"
HINT: Final = b"user.kvfs.hint"
LEASE: Final = b"user.kvfs.lease"
PIN: Final = b"user.kvfs.pin"
PUBLISH: Final = b"user.kvfs.publish"
#: Of a directory at the top of the mount: whether it is a tenant (entitlements.py).
TENANT: Final = b"user.kvfs.tenant"
TTL: Final = b"user.kvfs.ttl"
#: Every name under this belongs to kvfs.
PREFIX: Final = b"user.kvfs."
VALUES: Final[dict[bytes, frozenset[bytes]]] = {
    DRAFTS: frozenset({b"all", b"owner"}),
    EVICT: frozenset({b"auto", b"never", b"first", b"together"}),
    LEASE: frozenset({b"maker", b"none"}),
    PIN: frozenset({b"0", b"1"}),
    PUBLISH: frozenset({b"close", b"rename"}),
}
#: The value of ``ttl`` that overrides the ``ttl`` of a directory above.
NO_TTL: Final = b"none"
_TTL_LEAST_S: Final = 1.0
_TTL_UNITS: Final = {"d": 86_400, "h": 3600, "m": 60}
#: All policies; ``ttl`` has any age as its value, and ``hint`` what kvfs/core/hints.py says.
NAMES: Final = (*VALUES, TTL, HINT)
#: A path of a directory in the settings file has none of these parts.
NO_NAMES: Final = frozenset({"", ".", ".."})
_KNOWN: Final = "drafts, evict, hint, lease, publish, ttl or pin"


class DirectoryPolicy(NamedTuple):
    """What holds in a directory."""

    drafts_of_owner: bool = False
    evict: str = "auto"
    #: The directory with ``evict=together`` whose unit its files belong to; 0: each goes by itself.
    unit: InodeNo = NO_INODE
    pin: bool = False
    #: Whether a block closed under its final name is leased to the process that wrote it.
    leases: bool = True
    #: Whether only a rename makes a block visible to others than its maker.
    only_renamed: bool = False
    #: Seconds without a use after which a block is evicted, space or not; None: never.
    ttl_s: float | None = None
    #: What is said of its blocks, as far as they say nothing themselves.
    hint: BlockHint | None = None
    #: The directory at the top of the mount that is a tenant, and has its files; 0: none is.
    tenant: InodeNo = NO_INODE


def check_value(name: bytes, value: bytes) -> None:
    """Raise InvalidRequest unless *value* is allowed for policy *name*."""
    if name in (TTL, HINT):
        try:
            ttl_of(value) if name == TTL else hint_of(value)
        except ValueError as error:
            raise InvalidRequest(f"{name.decode()}: {error}") from None
        return
    if value not in VALUES.get(name, frozenset()):
        known = b", ".join(sorted(VALUES.get(name, frozenset()))).decode()
        raise InvalidRequest(f"{name.decode()}: must be one of {known or 'nothing'}")


def ttl_of(value: bytes) -> float | None:
    """Return the seconds of the value of ``ttl``, None for NO_TTL. Raises ValueError."""
    if value == NO_TTL:
        return None
    ttl_s = parse_age(value.decode("ascii", errors="replace"))
    if ttl_s < _TTL_LEAST_S:
        raise ValueError(f"must be at least {_TTL_LEAST_S:g} s, or {NO_TTL.decode()}")
    return ttl_s


def ttl_text(ttl_s: float | None) -> bytes:
    """Return the value of ``ttl`` that means *ttl_s*, in the largest unit that divides it."""
    if ttl_s is None:
        return NO_TTL
    for unit, unit_s in _TTL_UNITS.items():
        if ttl_s % unit_s == 0:
            return f"{ttl_s / unit_s:.0f}{unit}".encode()
    return f"{ttl_s:.9g}s".encode()


def policies_of(table: object) -> dict[str, dict[str, str]]:
    """Return the settings file's policies by path below the mountpoint; raises ValueError.

    ``[policies."/lmcache"]`` with ``drafts = "owner"``, ``evict = "never"``,
    ``lease = "none"``, ``publish = "rename"``, ``ttl = "7d"``, ``hint = "priority=80"`` or
    ``pin = true``.
    """
    if not isinstance(table, dict):
        raise ValueError('must be a table: write [policies."/DIR"]')
    found: dict[str, dict[str, str]] = {}
    for path, said in table.items():
        if not isinstance(said, dict) or not str(path).startswith("/"):
            raise ValueError(f'{path!r}: write [policies."/DIR"] with the path below the mount')
        if path != "/" and not NO_NAMES.isdisjoint(str(path)[1:].split("/")):
            raise ValueError(f"{path!r} is not a directory: leave out '.', '..' and empty parts")
        found[str(path)] = {key: _text(key, value) for key, value in said.items()}
    return found


def _text(key: str, value: object) -> str:
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if PREFIX + key.encode() == TTL:
        ttl_of(text.encode())
        return text
    if PREFIX + key.encode() == HINT:
        hint_of(text.encode())
        return text
    known = VALUES.get(PREFIX + key.encode())
    if known is None:
        raise ValueError(f"unknown policy {key!r}; use {_KNOWN}")
    if text.encode() not in known:
        raise ValueError(f"{key}: must be one of {b', '.join(sorted(known)).decode()}")
    return text
