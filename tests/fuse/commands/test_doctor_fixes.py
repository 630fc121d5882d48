"""The commands that `kvfs doctor` shows run as they are shown: each here, or it says why not."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.client.nfs.ganesha import Ganesha
from kvfs.doctor.examine import RULES, examine
from kvfs.doctor.facts import Below, ConnectorHabit, ConnectorLimit, Cpus, Facts, ReadAheadSetting
from kvfs.doctor.gather import gather
from tests.support.doctor.ill_drives import NVME, pool
from tests.support.doctor.ill_exports import ganesha_with
from tests.support.doctor.ill_mounts import CACHE, CHURNED, HEALTHY, ILL, SLOW
from tests.support.mounts.copies import detach_copies
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    Mounted,
    loop_device,
    skip_without_mounts,
    workplace,
)

MIB: Final = 1 << 20
Change = Callable[[Facts], dict[str, Any]]

#: How a command begins that is not run here: why.
NOT_RUN: Final = {
    "sysctl -w ": "changes the whole machine; that there is such a setting is tested",
    "echo none > /sys/block/": "needs a drive with that scheduler; the file is the kernel's",
    "echo 4096 > /sys/block/": "needs that drive; run below on the mount's own read-ahead",
    "for state in ": "changes the whole machine; its syntax is tested",
    "echo 200000 > /sys/module/haltpoll": "needs a virtual machine with that governor",
    "echo 400000 > /sys/module/haltpoll": "the same",
    "systemctl set-property ": "needs systemd as init",
    "echo max > /sys/fs/cgroup/": "needs a control group of one's own",
    ". /etc/os-release && ": "installs a kernel",
    "exportfs ": "no kernel here has an NFS server",
    "umount /kv && mount -t nfs ": "nor a client",
    "systemctl restart nfs-ganesha": "needs systemd as init",
    "kill 4711; ": "needs that server; test_export.py has a real one",
    "vllm serve ": "wants a GPU; test_doctor_habits.py reads it back",
    "taskset ": "run below with CPUs of this machine",
    "grep . /sys/bus/pci/devices/": "needs a GPU whose node is known",
    "kvfs drive drain /kv ": "needs a pool of several drives; test_drive_verbs.py has one",
    "lsblk --inverse ": "needs a RAID",
}


def first_lines() -> list[str]:
    """Return the command of every finding of the table of ill mounts."""
    return sorted(
        {
            finding.fix.splitlines()[0]
            for _, ill, *_ in ILL
            for verdict in examine(replace(HEALTHY, **ill)).verdicts
            for finding in verdict.findings
        }
    )


@pytest.mark.parametrize("command", first_lines())
def test_each_command_is_one(command: str) -> None:
    """Whole and right for a shell: nothing in it is to be filled in, and its program is there."""
    subprocess.run(["bash", "-n", "-c", command], check=True)
    assert not re.search(r"\b(DRIVE|SIZE|GROUP|SOURCE|MOUNT|PID|UNIT|NAME) ", f"{command} ")
    if not command.startswith(tuple(NOT_RUN)):
        program = command.removeprefix("d=$(").split()[0]
        assert program in ("kvfs", "export", "echo") or shutil.which(program), program


def test_no_reason_is_left_over() -> None:
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in first_lines()), start
    for command in first_lines():
        if command.startswith("sysctl -w vm."):
            names = re.findall(r"vm\.(\w+)=", command)
            assert names
            assert all(Path(f"/proc/sys/vm/{name}").exists() for name in names)


@pytest.fixture(scope="module")
def mounted() -> Iterator[Mounted]:
    """A mount of a directory on an XFS of its own, which commands may make anew."""
    skip_without_mounts()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(workplace())
        device = stack.enter_context(loop_device(600 * MIB, format_xfs=True))
        home = place / "home"
        home.mkdir()
        subprocess.run(["mount", "-o", "discard", device, home], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", home], check=False)
        (home / "pool").mkdir()
        yield stack.enter_context(
            Mounted(home / "pool", place / "kv", "--capacity=200M", "--data-path=daemon")
        )


def status(**changed: object) -> Change:
    return lambda facts: {"status": {**facts.status, **changed}}


def limits(**changed: object) -> Change:
    def change(facts: Facts) -> dict[str, Any]:
        assert facts.limits is not None
        return {"limits": facts.limits._replace(**changed)}

    return change


def options(*said: str) -> Change:
    def change(facts: Facts) -> dict[str, Any]:
        assert facts.backing is not None
        return {"backing": facts.backing._replace(options=frozenset(said))}

    return change


def lacks_space(facts: Facts) -> dict[str, Any]:
    assert facts.backing is not None
    return {"backing": facts.backing._replace(free_bytes=100 * MIB)}


def small_inodes(facts: Facts) -> dict[str, Any]:
    assert facts.xfs is not None
    return {"xfs": facts.xfs._replace(inode_bytes=512, has_reflink=False, has_rmapbt=False)}


def far(facts: Facts) -> dict[str, Any]:
    assert facts.disks is not None
    mine = min(os.sched_getaffinity(0))
    disks = HEALTHY.disks
    assert disks is not None
    by_node = {0: frozenset({mine}), 1: frozenset({4095})}
    return {"disks": (disks[0]._replace(numa_node=0),), "cpus": Cpus(frozenset({4095}), by_node)}


def read_ahead(facts: Facts) -> dict[str, Any]:
    assert facts.fuse_read_ahead is not None
    slow = ReadAheadSetting(4096, facts.fuse_read_ahead.path)
    changed = status(data_path="daemon")(facts)
    return {**changed, "device_read_ahead": None, "fuse_read_ahead": slow}


def churned(facts: Facts) -> dict[str, Any]:
    (Path(facts.mountpoint) / "batch").mkdir(exist_ok=True)
    changed: dict[str, Any] = status(cache={**CACHE, **CHURNED}, used_bytes=100 * MIB)(facts)
    return changed


def may_raise_limits() -> bool:
    """Whether this process has CAP_SYS_RESOURCE, which root in a container may lack."""
    said = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    return bool(int(said, 16) >> 24 & 1)


def read_only(mountpoint: str) -> Ganesha:
    server = ganesha_with(access="RO")
    text = server.configuration.text.replace("/kv", mountpoint)
    return server._replace(configuration=server.configuration._replace(text=text))


FOR_THE_PRIVILEGED: Final = frozenset({"open files", "OOM killer"})
MYSELF: Final = f"process {os.getpid()} (python)"
LIMIT: Final = ConnectorLimit("LMCACHE_MAX_LOCAL_DISK_SIZE", 1 << 50, "process 5 (vllm)", 1 << 30)
KEEPS: Final = ConnectorHabit("keeps a file per key", "process 6 (x)")
KEEPS_A_BASE: Final = ConnectorHabit("keeps a database", "process 6 (x)")
RUN: Final[list[tuple[str, Change]]] = [
    ("connector limits", lambda _: {"limits_of_connectors": (LIMIT,)}),
    (
        "connector limits",
        lambda _: {"limits_of_connectors": (LIMIT._replace(unit_bytes=1 << 40),)},
    ),
    (
        "connector limits",
        lambda _: {"limits_of_connectors": (LIMIT._replace(setting="s", origin=MYSELF),)},
    ),
    ("below the mount", lambda _: {"below": Below(1, 1, is_whole=True)}),
    (
        "databases",
        lambda facts: {
            "habits_of_connectors": (KEEPS_A_BASE._replace(command=f"{facts.mountpoint}/base"),)
        },
    ),
    ("file per key", lambda _: {"habits_of_connectors": (KEEPS,)}),
    ("evictable data", status(used_bytes=200 * MIB, evictable_bytes=0, pinned_bytes=MIB)),
    ("evictable data", status(used_bytes=200 * MIB, evictable_bytes=0, leased_bytes=MIB)),
    (
        "leases",
        status(leased_bytes=2, lease_max_bytes=1, largest_lease_holder={"pid": 1, "program": "x"}),
    ),
    ("backing space", lacks_space),
    ("index map", lambda facts: status(index_used_bytes=facts.status["index_map_bytes"])(facts)),
    ("index memory", status(index_memory={"bytes": MIB, "free_bytes": 0, "full": True})),
    ("units", status(together={"too_large": ["/base"]})),
    ("hit rate", status(cache={**CACHE, "hits": 0, "misses": 5000})),
    ("lives of blocks", churned),
    ("store times", status(store_times=SLOW)),
    ("store times", status(store_times=SLOW, space_waits={"count": 1})),
    ("durability", status(durability={"within_s": 10, "oldest_s": 30})),
    ("damage", status(damaged_rows=1)),
    ("damage", status(write_back_failures=1)),
    *(
        ("passthrough", status(data_path="daemon", data_path_reason=why))
        for why in ("asked for by data_path", "(overlayfs)", "the server has no CAP_SYS_ADMIN")
    ),
    ("small reads", status(requests={"READ": 50_000}, server_read_bytes=50_000)),
    ("supervisor", status(supervisor_pid=None)),
    ("open files", limits(open_files_max=1024)),
    ("OOM killer", limits(oom_score_adj=200)),
    ("NUMA", far),
    ("read-ahead", read_ahead),
    ("rotating drive", lambda _: {"disks": tuple(d._replace(is_rotational=True) for d in DISKS)}),
    ("unlike drives", lambda _: pool(NVME, NVME._replace(model="B"))),
    ("mount options", options("rw", "sync")),
    ("mount options", options("rw", "discard")),
    ("mount options", options("rw", "wsync")),
    ("XFS", small_inodes),
    ("NFS-Ganesha", lambda facts: {"ganeshas": (read_only(facts.mountpoint),)}),
]
DISKS: Final = HEALTHY.disks or ()


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
@pytest.mark.parametrize(
    ("check", "change"),
    [
        # Beside no other test: each new namespace gets a copy of the mount, which keeps it busy.
        pytest.param(*one, id=one[0], marks=[pytest.mark.drops_caches] if one[0] == "XFS" else [])
        for one in RUN
    ],
)
def test_the_command_runs_as_shown(mounted: Mounted, check: str, change: Change) -> None:
    """As root who copies it, and the mount is there afterwards."""
    facts = gather(str(mounted.path))
    findings = RULES[check](replace(facts, **change(facts)))
    assert findings
    command = findings[0].fix.splitlines()[0]
    if check == "XFS":
        detach_copies(mounted.path, Path(mounted.source).parent)
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )
    if check in FOR_THE_PRIVILEGED and not may_raise_limits():
        assert re.search("permi", done.stdout, re.IGNORECASE), done.stdout
    else:
        assert done.returncode == 0, f"{command}\n{done.stdout}"
    # The server may be another one now.
    mounted.adopt()


def test_every_rule_is_run_or_says_why_not() -> None:
    """What has no command of its own here has one in the list of those that are not run."""
    run = {check for check, _ in RUN}
    for check, ill, *_ in ILL:
        findings = RULES[check](replace(HEALTHY, **ill)) or []
        for finding in findings:
            assert check in run or finding.fix.startswith(tuple(NOT_RUN)), finding.fix
