"""The short name of a mount, and the paths that are made from it; pure text.

The name is what ``kvfs@NAME.service``, ``/run/kvfs/NAME.sock``, ``/run/kvfs/NAME.metrics``,
``/etc/kvfs/NAME.toml`` and ``/var/log/kvfs/NAME.log`` have in common.
"""

import hashlib
import re
from typing import Final

from kvfs.core.errors import UsageError

RUN_DIRECTORY: Final = "/run/kvfs"
CONFIG_DIRECTORY: Final = "/etc/kvfs"
LOG_DIRECTORY: Final = "/var/log/kvfs"
SOCKET_SUFFIX: Final = ".sock"
METRICS_SUFFIX: Final = ".metrics"
EVENTS_SUFFIX: Final = ".events"
HINTS_SUFFIX: Final = ".hints"
DEAD_SUFFIX: Final = ".dead"
#: A socket's path holds 107 bytes (sun_path of unix(7)); this leaves room for the directory.
NAME_MAX_CHARACTERS: Final = 64

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._]+")


def name_of(mountpoint: str) -> str:
    """Return the name of the mount at the absolute path *mountpoint*: ``mnt-kv`` for ``/mnt/kv``.

    If another path could have the same name, the name ends in a digest of the path.
    """
    plain = mountpoint.strip("/")
    name = "-".join(part for part in plain.split("/") if part)
    if _NAME.fullmatch(name) and "-" not in plain and len(name) <= NAME_MAX_CHARACTERS:
        return name
    digest = hashlib.sha256(mountpoint.encode(errors="surrogateescape")).hexdigest()[:8]
    tail = _UNSAFE.sub("-", plain).strip("-.")[-(NAME_MAX_CHARACTERS - len(digest) - 1) :]
    return f"{tail.lstrip('-.') or 'root'}-{digest}"


def check_name(name: str) -> str:
    """Return *name*; raises UsageError when it cannot be part of a file name and a unit name."""
    if _NAME.fullmatch(name) and len(name) <= NAME_MAX_CHARACTERS:
        return name
    raise UsageError(
        f"name {name!r}: give 1 to {NAME_MAX_CHARACTERS} letters, digits, '.', '_' or '-'"
    )


def socket_path(name: str) -> str:
    """Return the path of the control socket of the mount called *name*."""
    return f"{RUN_DIRECTORY}/{name}{SOCKET_SUFFIX}"


def dead_path(mountpoint: str) -> str:
    """Return the path of the file that says why *mountpoint* has no server any more."""
    return f"{RUN_DIRECTORY}/{name_of(mountpoint)}{DEAD_SUFFIX}"


def metrics_path(name: str) -> str:
    """Return the path of the socket on which the mount called *name* serves its metrics."""
    return f"{RUN_DIRECTORY}/{name}{METRICS_SUFFIX}"


def events_path(name: str) -> str:
    """Return the path of the socket on which the mount called *name* sends events."""
    return f"{RUN_DIRECTORY}/{name}{EVENTS_SUFFIX}"


def hints_path(name: str) -> str:
    """Return the path of the socket on which the mount called *name* takes hints."""
    return f"{RUN_DIRECTORY}/{name}{HINTS_SUFFIX}"


def config_path(name: str) -> str:
    """Return the path of the settings file that the mount called *name* reads by default."""
    return f"{CONFIG_DIRECTORY}/{name}.toml"


def log_path(name: str) -> str:
    """Return the log file of the mount called *name* where there is no journal and no syslog."""
    return f"{LOG_DIRECTORY}/{name}.log"
