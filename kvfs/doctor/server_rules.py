"""Rules about the server process: what it may use, and what ends it."""

import shlex
from typing import Final

from kvfs.core.settings import Settings
from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Facts, Limits
from kvfs.doctor.finding import Finding, Severity
from kvfs.machine.sysctls import MAX_REQUEST_TIMEOUT

#: Enough for recently opened blocks (backing_ids_max), ready extents and open blocks.
_OPEN_FILES_LOW: Final = 65_536
_OPEN_FILES_WANTED: Final = Settings().open_files_max
_NEARLY_ALL_SHARE: Final = 0.8
#: Needed by the server beside its index. On the daemon path the page cache of every block that the
#: server moves is charged to it, too.
_MEMORY_SERIOUS_BYTES: Final = 512 << 20
_MEMORY_LOW_BYTES: Final = 2 << 30
_OOM_SCORE_WANTED: Final = Settings().oom_score_adj


def request_timeout(facts: Facts) -> list[Finding] | None:
    """A request timeout does not fail one request: it aborts the whole connection."""
    wait_s, timeout_s = facts.status.get("request_wait_max_s"), facts.request_timeout_max_s
    if wait_s is None or timeout_s is None:
        return None
    if not timeout_s or timeout_s > wait_s:
        return []
    return [
        Finding(
            Severity.SERIOUS,
            f"{MAX_REQUEST_TIMEOUT} = {timeout_s} (seconds): the kernel aborts the whole mount "
            f"when one request takes longer, and here one may wait for {wait_s:g} s",
            f"sysctl -w {MAX_REQUEST_TIMEOUT}=0\n"
            "then unmount and mount: the limit is agreed on at the mount",
        )
    ]


def supervisor(facts: Facts) -> list[Finding] | None:
    """Without a supervisor the server's death ends the mount: calls fail until the next mount."""
    if "supervisor_pid" not in facts.status:
        return None
    if facts.status["supervisor_pid"]:
        return []
    where, source = shlex.quote(facts.mountpoint), shlex.quote(facts.source)
    return [
        Finding(
            Severity.WARNING,
            "the server has no supervisor, which would start another one: if it dies, the mount is "
            "dead, and all calls on it fail",
            f"kvfs umount {where} && kvfs mount {source} {where}\n"
            "when nobody uses it, with the same options; everything stored is still there",
        )
    ]


def open_files(facts: Facts) -> list[Finding] | None:
    """For every open block the server has an extent open."""
    if facts.limits is None:
        return None
    used, most = facts.limits.open_files, facts.limits.open_files_max
    if used < _NEARLY_ALL_SHARE * most and most >= _OPEN_FILES_LOW:
        return []
    nearly = used >= _NEARLY_ALL_SHARE * most
    wanted = max(_OPEN_FILES_WANTED, 2 * most if nearly else 0)
    fix = f"prlimit --pid {facts.server_pid} --nofile={wanted}:{wanted}"
    if facts.limits.unit:
        fix += f"\nfor good: LimitNOFILE={wanted} by `systemctl edit {facts.limits.unit}`"
    return [
        Finding(
            Severity.SERIOUS if nearly else Severity.WARNING,
            f"the server may have {most} files open, and has {used}: opens fail beyond it",
            fix,
        )
    ]


def memory_bound(facts: Facts) -> list[Finding] | None:
    """A server that reaches its memory limit is killed, or waits for its own page cache."""
    if facts.limits is None:
        return None
    most_bytes = facts.limits.memory_max_bytes
    # The tmpfs pages of the index are charged to the server that wrote them.
    index_bytes = (facts.status.get("index_memory") or {}).get("bytes") or 0
    if most_bytes is None or most_bytes >= _MEMORY_LOW_BYTES + index_bytes:
        return []
    serious = most_bytes < _MEMORY_SERIOUS_BYTES + index_bytes
    return [
        Finding(
            Severity.SERIOUS if serious else Severity.WARNING,
            f"the server may use {format_size(most_bytes)} of memory: too little for it and its "
            "index; beyond it the kernel kills the server or makes it wait",
            _property("MemoryMax=infinity", facts.limits, facts.limits.memory_group),
        )
    ]


def cpu_bound(facts: Facts) -> list[Finding] | None:
    """While a server is throttled, every open waits for its next share of CPU time."""
    if facts.limits is None:
        return None
    if facts.limits.cpus_max is None or facts.limits.cpus_max >= 1:
        return []
    return [
        Finding(
            Severity.WARNING,
            f"the server may use {facts.limits.cpus_max:.2f} of a CPU: every open and store waits "
            "while it is throttled",
            _property("CPUQuota=", facts.limits, facts.limits.cpu_group),
        )
    ]


def _property(assignment: str, limits: Limits, file: str) -> str:
    """Return the command that lifts the limit in a control group's *file*.

    A systemd unit's limit is lifted by systemd, which would otherwise restore it. No limit is "max"
    in the files of version 2, -1 in those of version 1 (cgroups(7)).
    """
    group = file.rpartition("/")[0].rpartition("/")[2]
    unit = group if group.endswith((".service", ".slice", ".scope")) else limits.unit
    if unit and (not file or unit == group):
        return f"systemctl set-property {shlex.quote(unit)} {assignment}"
    none = "max" if file.endswith(".max") else "-1"
    return f"echo {none} > {shlex.quote(file)}"


def oom_killer(facts: Facts) -> list[Finding] | None:
    """The server is small and its death stalls everybody: it should be killed last."""
    if facts.limits is None:
        return None
    if facts.limits.oom_score_adj <= 0:
        return []
    return [
        Finding(
            Severity.WARNING,
            f"the kernel's OOM killer prefers the server (oom_score_adj "
            f"{facts.limits.oom_score_adj}); its death ends the mount",
            f"echo {_OOM_SCORE_WANTED} > /proc/{facts.server_pid}/oom_score_adj",
        )
    ]
