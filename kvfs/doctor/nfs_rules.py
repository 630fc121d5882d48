"""Rules about NFS: how the mount is exported, and how a client has mounted one.

exports(5) and nfs(5).
"""

import hashlib
import re
import shlex
from typing import Final

from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Export, Facts, NfsMount
from kvfs.doctor.finding import Finding, Severity

_SIZE_WANTED_BYTES: Final = 1 << 20
_BOUNDED: Final = frozenset({"soft", "softerr"})
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_SAFE_EXPORT: Final = "rw,async,no_subtree_check,fsid={}"


def exports(facts: Facts) -> list[Finding] | None:
    """The kernel's NFS server knows a file system by its drive; a FUSE mount has none."""
    if facts.exports is None:
        return None
    found = []
    for export in facts.exports:
        options = _SAFE_EXPORT.format(_own_fsid(facts, export.path))
        fix = f"exportfs -o {options} {shlex.quote(f'{export.client}:{export.path}')}"
        if not any(option.startswith(("fsid=", "uuid=")) for option in export.options):
            problem = "without fsid=: the kernel refuses it, or its handles die at each mount"
            found.append(_of_export(Severity.SERIOUS, export, problem, fix))
        if export.same_fsid:
            shared = f"with the fsid of {', '.join(export.same_fsid)}"
            problem = f"{shared}: clients of one are given files of the other"
            found.append(_of_export(Severity.SERIOUS, export, problem, fix))
        if "subtree_check" in export.options:
            problem = (
                "with subtree_check: a handle holds its directory, and a rename from a draft's "
                "directory makes it stale"
            )
            found.append(_of_export(Severity.WARNING, export, problem, fix))
        if "ro" in export.options:
            problem = "read-only: no client can store"
            found.append(_of_export(Severity.NOTE, export, problem, fix))
    return found


def _own_fsid(facts: Facts, path: str) -> str:
    """Return an fsid= for *path* that no other export has, the same each time (exports(5)).

    The pool's UUID; of a directory in it one that is made of that and its path.
    """
    below = path.removeprefix(facts.mountpoint)
    pool = str(facts.status.get("uuid", ""))
    if _UUID.fullmatch(pool) and not below:
        return pool
    named = f"{pool or facts.source}{below}".encode(errors="backslashreplace")
    digits = hashlib.sha256(named).hexdigest()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def _of_export(severity: Severity, export: Export, problem: str, fix: str) -> Finding:
    return Finding(severity, f"{export.path} is exported to {export.client} {problem}", fix)


def mount(facts: Facts) -> list[Finding] | None:
    """A client's own options can make a miss hang and a lookup cost a round trip."""
    if facts.nfs is None:
        return []
    given = facts.nfs.options
    found = []
    if not _BOUNDED & given.keys():
        problem = "hard: an unreachable server makes every load hang instead of a miss"
        change = {"hard": None, "softerr": "", "timeo": "50", "retrans": "2"}
        found.append((Severity.WARNING, problem, change))
    for option, problem in (
        ("sync", "sync: every write waits for the server"),
        ("noac", "noac: every lookup asks the server, and writes are synchronous"),
    ):
        if option in given:
            found.append((Severity.WARNING, problem, {option: None}))
    if given.get("lookupcache") in ("none", "pos", "positive"):
        problem = f"lookupcache={given['lookupcache']}: every miss asks the server again"
        found.append((Severity.WARNING, problem, {"lookupcache": "all"}))
    for option in ("rsize", "wsize"):
        size_bytes = int(given[option]) if given.get(option, "").isdigit() else None
        if size_bytes is not None and size_bytes < _SIZE_WANTED_BYTES:
            problem = f"{option}={size_bytes}: {format_size(size_bytes)} a message"
            found.append((Severity.WARNING, problem, {option: str(_SIZE_WANTED_BYTES)}))
    if given.get("proto", "").startswith("udp"):
        found.append((Severity.WARNING, "proto=udp: lost fragments stall it", {"proto": "tcp"}))
    if given.get("proto", "tcp").startswith("tcp") and "nconnect" not in given:
        problem = "one connection: a single stream rarely fills a fast network"
        found.append((Severity.NOTE, problem, {"nconnect": "8"}))
    return [
        Finding(
            severity,
            f"{facts.mountpoint} is mounted from {facts.nfs.source} with {problem}",
            _mount_with(facts.mountpoint, facts.nfs, change),
        )
        for severity, problem, change in found
    ]


#: What nfs(5) lets a person say; the kernel's table also shows what was agreed.
_SAYABLE: Final = (
    "vers", "proto", "rsize", "wsize", "softerr", "soft", "timeo", "retrans", "lookupcache",
    "nconnect", "sec", "noac", "sync",
)  # fmt: skip


def _mount_with(mountpoint: str, nfs: NfsMount, change: dict[str, str | None]) -> str:
    """Return the commands that mount it anew; a remount refuses most of these options."""
    said: dict[str, str | None] = {
        name: nfs.options[name] for name in _SAYABLE if name in nfs.options
    }
    said.update(change)
    options = ",".join(
        f"{name}={value}" if value else name for name, value in said.items() if value is not None
    )
    where = shlex.quote(mountpoint)
    return f"umount {where} && mount -t nfs -o {options} {shlex.quote(nfs.source)} {where}"
