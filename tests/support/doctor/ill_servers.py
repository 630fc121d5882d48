"""Server processes as the doctor's rules find them ill: what they may use, and what ends them."""

from collections.abc import Mapping
from typing import Any, Final

from kvfs.doctor.facts import Limits
from kvfs.doctor.finding import Severity

GIB: Final = 1 << 30
SERIOUS, WARNING = Severity.SERIOUS, Severity.WARNING
LIMITS: Final = Limits(300, 1_048_576, None, None, "kvfs@kv.service", -900)
#: A control group that systemd does not know.
GROUP: Final = "/sys/fs/cgroup/a/memory.max"


def ill_servers(status: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], Severity, str, str]]:
    """Return the rows of the table of ill mounts; *status* is a healthy one's."""
    return [
        (
            "supervisor",
            {"status": {**status, "supervisor_pid": None}},
            WARNING,
            "the server has no supervisor",
            "kvfs umount /kv && kvfs mount ",
        ),
        (
            "request timeout",
            {"request_timeout_max_s": 60},
            SERIOUS,
            "fs.fuse.max_request_timeout = 60",
            "sysctl -w fs.fuse.max_request_timeout=0\n",
        ),
        (
            "open files",
            {"limits": LIMITS._replace(open_files_max=1024)},
            WARNING,
            "may have 1024 files open",
            "prlimit --pid 77 --nofile=1048576:1048576\nfor good: LimitNOFILE=1048576",
        ),
        (
            "open files",
            {"limits": LIMITS._replace(open_files=1_000_000, unit="")},
            SERIOUS,
            "has 1000000",
            "--nofile=2097152:2097152",
        ),
        (
            "memory bound",
            {"limits": LIMITS._replace(memory_max_bytes=GIB)},
            WARNING,
            "1 GiB of memory",
            "systemctl set-property kvfs@kv.service MemoryMax=infinity",
        ),
        (
            "memory bound",
            {"limits": LIMITS._replace(memory_max_bytes=GIB // 4, unit="", memory_group=GROUP)},
            SERIOUS,
            "256 MiB of memory",
            "echo max > /sys/fs/cgroup/a/memory.max",
        ),
        (
            "CPU bound",
            {"limits": LIMITS._replace(cpus_max=0.5)},
            WARNING,
            "0.50 of a CPU",
            "systemctl set-property kvfs@kv.service CPUQuota=",
        ),
        (
            "OOM killer",
            {"limits": LIMITS._replace(oom_score_adj=200)},
            WARNING,
            "oom_score_adj 200",
            "echo -900 > /proc/77/oom_score_adj",
        ),
    ]
