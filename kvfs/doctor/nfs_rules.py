"""Rules about NFS: how the mount is exported, and how a client has mounted one.

exports(5) and nfs(5).
"""

import shlex
from typing import Final

from kvfs.client.nfs.ganesha import Ganesha, exports_below, restart_of
from kvfs.client.nfs.ganesha_config import (
    FIT,
    FIT_EXPIRATION_S,
    CacheSettings,
    GaneshaExport,
    cache_settings,
    exports_of,
    filesystem_id_of,
    parse,
)
from kvfs.client.nfs.nfsd import Export, options_of, own_fsid
from kvfs.client.nfs.squash import NONE, Root, Squash, fitting
from kvfs.core.sizes import count_of, format_size
from kvfs.doctor.facts import Facts, NfsMount
from kvfs.doctor.finding import Finding, Severity

_SIZE_WANTED_BYTES: Final = 1 << 20
_BOUNDED: Final = frozenset({"soft", "softerr"})
#: If Ganesha believes for longer that a block exists, loads of evicted blocks fail.
_EXPIRATION_MAX_S: Final = 10
#: More than clients use at once, so Ganesha does not close them.
_OPEN_FILES_MAX: Final = 1000


def exports(facts: Facts) -> list[Finding] | None:
    """The kernel's NFS server identifies a file system by its drive; a FUSE mount has none."""
    if facts.exports is None:
        return None
    root = Root.of_status(facts.status)
    found = []
    for export in facts.exports:
        squash = _better(export.squash, root)
        options = options_of(squash, _own_fsid(facts, export.path))
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
        elif export.path == facts.mountpoint and (refused := _refused(export.squash, root)):
            severity, problem = refused
            found.append(_of_export(severity, export, problem, fix))
    return found


def _own_fsid(facts: Facts, path: str) -> str:
    below = path.removeprefix(facts.mountpoint)
    return own_fsid(str(facts.status.get("uuid", "")), facts.source, below)


def _better(squash: Squash, root: Root | None) -> Squash:
    """Return *squash* if clients can store with it, else one with which they can."""
    if root is None or squash.lets_root_store(root):
        return squash
    return fitting(root, squash.kind)


def _refused(squash: Squash, root: Root | None) -> tuple[Severity, str] | None:
    """Return how bad it is that clients cannot store, and who cannot; None if all can."""
    if root is None or squash.lets_root_store(root):
        return None
    taken = f"taken for uid {squash.uid}, which may not write to a root directory of uid {root.uid}"
    mode = f"and mode {root.mode:04o}"
    if squash.lets_somebody_store(root):
        return (
            Severity.NOTE,
            f"with its root {taken} {mode}: what runs as root there cannot store",
        )
    return Severity.SERIOUS, f"so that nobody can store: they are {taken} {mode}"


def _of_export(severity: Severity, export: Export, problem: str, fix: str) -> Finding:
    return Finding(severity, f"{export.path} is exported to {export.client} {problem}", fix)


def ganesha(facts: Facts) -> list[Finding] | None:
    """NFS-Ganesha keeps files open that no client uses, unless its configuration says otherwise."""
    found: list[Finding] = []
    is_decided = True
    root = Root.of_status(facts.status)
    for server in facts.ganeshas:
        blocks = parse(server.configuration.text)
        exporting = exports_of(blocks)
        ours = exports_below(server, facts.mountpoint)
        if not ours and not server.open_files:
            is_decided = is_decided and not server.configuration.unread
            continue
        if server.configuration.unread:
            is_decided = False
        else:
            found += _closing(server, cache_settings(blocks) or CacheSettings())
        found += _moved(facts) if ours else []
        found += [
            finding for one in ours for finding in _of_block(facts, server, one, exporting, root)
        ]
    return found if found or is_decided else None


def _moved(facts: Facts) -> list[Finding]:
    """Return a finding if the mount's device number, which is in each client's handle, changed."""
    before = facts.status.get("device_number_before")
    if before is None:
        return []
    now = facts.status.get("device_number")
    problem = (
        f"{facts.mountpoint} has device number {now} and had {before} before, which another mount "
        "had taken: handles that NFS-Ganesha gave to clients are ESTALE"
    )
    where = shlex.quote(facts.mountpoint)
    return [Finding(Severity.WARNING, problem, f"umount {where} && mount {where}\non each client")]


def _closing(server: Ganesha, cache: CacheSettings) -> list[Finding]:
    """Return a finding if *server* keeps files open that no client uses."""
    path = server.configuration.path
    has_open = ""
    if server.open_files is not None:
        at_least = "at least " if server.unknown_files else ""
        has_open = f"; it has {at_least}{count_of(server.open_files, 'file')} of the mount open"
    if cache != FIT:
        problem = (
            f"NFS-Ganesha (process {server.pid}) keeps files open that no client uses: in {path} "
            f"FD_LWMark_Percent is {cache.fd_lwmark_percent} and LRU_Run_Interval "
            f"{cache.lru_run_interval_s}{has_open}"
        )
        lines = f"FD_LWMark_Percent = {FIT.fd_lwmark_percent}; LRU_Run_Interval = "
        lines += f"{FIT.lru_run_interval_s};"
        fix = f"{restart_of(server)}\nbefore that, say in its block MDCACHE {{ {lines} }}"
        return [Finding(Severity.WARNING, problem, fix)]
    if server.open_files is not None and server.open_files > _OPEN_FILES_MAX:
        problem = f"NFS-Ganesha (process {server.pid}) closes nothing{has_open}"
        if server.is_older:
            problem += "; its configuration is newer than the process"
        return [Finding(Severity.WARNING, problem, restart_of(server))]
    return []


def _of_block(
    facts: Facts,
    server: Ganesha,
    export: GaneshaExport,
    exporting: tuple[GaneshaExport, ...],
    root: Root | None,
) -> list[Finding]:
    """Return what is wrong with one EXPORT block."""
    where = f"Export_Id {export.export_id} of {server.configuration.path} exports {export.path}"
    found = []

    def add(severity: Severity, problem: str, line: str) -> None:
        fix = f"kvfs export {shlex.quote(facts.mountpoint)} --server ganesha --client '*'"
        remark = f"shows a block that is right; in yours say {line}, then reload NFS-Ganesha"
        found.append(Finding(severity, f"{where} {problem}", f"{fix}\n{remark}"))

    fsid = filesystem_id_of(_own_fsid(facts, export.path.rstrip("/")))
    same = [one.path for one in exporting if one.filesystem_id == export.filesystem_id]
    if export.filesystem_id and len(same) > 1:
        problem = f"with one Filesystem_Id for {', '.join(same)}: clients take them for one"
        add(Severity.SERIOUS, problem, f"Filesystem_Id = {fsid};")
    if not 0 <= export.attr_expiration_s <= _EXPIRATION_MAX_S:
        seconds = export.attr_expiration_s
        how_long = f"{seconds} s" if seconds >= 0 else "ever"
        problem = f"and believes for {how_long} that a block is there which was evicted meanwhile"
        add(Severity.WARNING, problem, f"Attr_Expiration_Time = {FIT_EXPIRATION_S};")
    if not export.is_writable:
        add(Severity.NOTE, "read-only: no client can store", "Access_Type = RW;")
    elif export.path.rstrip("/") == facts.mountpoint and (refused := _refused(export.squash, root)):
        severity, problem = refused
        better = _better(export.squash, root)
        line = (
            "Squash = No_Root_Squash;"
            if better.kind == NONE
            else f"Anonymous_Uid = {better.uid}; Anonymous_Gid = {better.gid};"
        )
        add(severity, problem, line)
    return found


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


#: The options that nfs(5) accepts; the kernel's table also shows what client and server agreed on.
_SAYABLE: Final = (
    "vers", "proto", "rsize", "wsize", "softerr", "soft", "timeo", "retrans", "lookupcache",
    "nconnect", "sec", "noac", "sync",
)  # fmt: skip


def _mount_with(mountpoint: str, nfs: NfsMount, change: dict[str, str | None]) -> str:
    """Return the commands that mount it again: a remount refuses most of these options."""
    said: dict[str, str | None] = {
        name: nfs.options[name] for name in _SAYABLE if name in nfs.options
    }
    said.update(change)
    options = ",".join(
        f"{name}={value}" if value else name for name, value in said.items() if value is not None
    )
    where = shlex.quote(mountpoint)
    return f"umount {where} && mount -t nfs -o {options} {shlex.quote(nfs.source)} {where}"
