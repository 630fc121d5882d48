"""A healthy mount as `kvfs doctor` sees it, and for each rule ones that are ill."""

from typing import Any, Final

from kvfs.client.nfs.nfsd import Export
from kvfs.doctor.facts import (
    BackingFs,
    Below,
    ConnectorHabit,
    ConnectorLimit,
    Cpus,
    Dirty,
    Disk,
    DriveBelow,
    Facts,
    ReadAheadSetting,
    Wake,
    Xfs,
)
from kvfs.doctor.finding import Severity
from tests.support.doctor.ill_drives import ILL_DRIVES
from tests.support.doctor.ill_exports import ILL_EXPORTS, NFSD_OPTIONS, ganesha_with
from tests.support.doctor.ill_servers import LIMITS, ill_servers

GIB: Final = 1 << 30
KIB: Final = 1 << 10

STATUS: dict[str, Any] = {
    "uuid": "0e3c1ff2-0c2d-4b2c-9a5e-6f0e3c1ff20c",
    "root": {"uid": 0, "gid": 0, "mode": "0755"},
    "capacity_bytes": 1000 * GIB,
    "used_bytes": 950 * GIB,
    "preallocated_bytes": 10 * GIB,
    "evictable_bytes": 900 * GIB,
    "data_path": "passthrough",
    "requests": {"READ": 20_000},
    "server_read_bytes": 20_000 * 128 * KIB,
    "data_path_reason": "the kernel and the backing file system allow it",
    "index_used_bytes": 50 * GIB,
    "index_map_bytes": 64 * GIB,
    "index_in": "/dev/shm/kvfs-0123456789abcdef.01234567/0123456789abcdef0123456789abcdef",
    "index_memory": {"bytes": GIB // 16, "free_bytes": 60 * GIB, "full": False},
    "durability": {"within_s": 10.0, "oldest_s": 6.0, "blocks": 7, "bytes": GIB},
    "damaged_rows": 0,
    "together": {"units": 1, "files": 20, "bytes": 3 * GIB, "too_large": []},
    "background_failures": 0,
    "leased_bytes": 9 * GIB,
    "lease_max_bytes": 900 * GIB,
    "largest_lease_holder": None,
    "supervisor_pid": 76,
    "request_wait_max_s": 103.0,
}
DIRECTORY: Final = {"hits": 900, "misses": 300, "stored_blocks": 300}
CACHE: Final = {
    "hits": 1800,
    "misses": 600,
    "evicted": {"space": {"blocks": 40, "bytes": 100 * GIB}, "command": {"blocks": 0, "bytes": 0}},
    "age_at_eviction": {"p50_s": 200.0},
    "curve": [{"factor": 1.0, "hit_rate": 0.75}, {"factor": 2.0, "hit_rate": 0.8}],
    "directories": {"chat": DIRECTORY, "batch": {**DIRECTORY, "hits": 3}, "/": DIRECTORY},
}
STATUS |= {
    "cache": CACHE,
    "store_times": {"recent": {"count": 5000, "p99_s": 0.2}},
    "space_waits": {"count": 0},
}
#: Twenty times what the pool holds.
CHURNED: Final = {"evicted": {"space": {"blocks": 9000, "bytes": 19_000 * GIB}}}
SLOW: Final = {"recent": {"count": 5000, "p99_s": 2.5}}
LESSEE: Final = {"pid": 4711, "program": "vllm", "bytes": 9 * GIB, "stores_refused": 7}
KEEPS: Final = ("process 4711 (vllm)", "setfattr -n user.kvfs.lease -v none /kv")
HOME: Final = BackingFs("xfs", frozenset({"rw", "noatime"}), "/data", 100 * GIB, "/dev/nvme0n1")
HEALTHY: Final = Facts(
    mountpoint="/kv",
    source="/data/pool",
    kind="directory",
    server_pid=77,
    status=STATUS,
    backing=HOME,
    below=Below(0, 0, is_whole=True),
    disks=(Disk("nvme0n1", "none", False, 1),),
    drives=(DriveBelow(0, "/data/pool", (Disk("nvme0n1", "none", False, 1),)),),
    gpus=(),
    device_read_ahead=ReadAheadSetting(4096 * KIB, "/sys/block/nvme0n1/queue/read_ahead_kb"),
    fuse_read_ahead=ReadAheadSetting(128 * KIB, "/sys/class/bdi/0:50/read_ahead_kb"),
    xfs=Xfs("/dev/nvme0n1", 4000 * GIB, 1024, 2 * GIB, has_reflink=False, has_rmapbt=False),
    dirty=Dirty(GIB, 8 * GIB),
    zone_reclaim_mode=0,
    limits=LIMITS,
    cpus=Cpus(frozenset({8, 9}), {0: frozenset(range(8)), 1: frozenset(range(8, 16))}),
    wake=Wake(9.5, None),
    request_timeout_max_s=0,
    habits_of_connectors=(),
    exports=(Export("/kv", "10.0.0.0/24", NFSD_OPTIONS),),
    ganeshas=(ganesha_with(),),
)

DAEMON: Final = {"data_path": "daemon"}
#: On that path the mount's own read-ahead counts, which the kernel starts with 128 KiB.
FAR: Final = {"fuse_read_ahead": HEALTHY.device_read_ahead}

SERIOUS, WARNING, NOTE = Severity.SERIOUS, Severity.WARNING, Severity.NOTE


def status(**changed: object) -> dict[str, Any]:
    return {"status": {**STATUS, **changed}}


def disks(**changed: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"disks": (HEALTHY.disks[0]._replace(**changed),)} if HEALTHY.disks else {}


def connectors(*limits: ConnectorLimit) -> dict[str, Any]:
    return {"limits_of_connectors": limits}


LOCAL_DISK: Final = ConnectorLimit(
    "LMCACHE_MAX_LOCAL_DISK_SIZE", 1200 * GIB, "process 5 (vllm)", GIB
)
IN_A_FILE: Final = ConnectorLimit("max_local_disk_size", 1200 * GIB, "l.yaml", GIB, "l.yaml")

FAILS: Final = ConnectorHabit(
    "fails requests",
    "process 5 (vllm)",
    'vllm serve MODEL --kv-transfer-config \'{"kv_load_failure_policy": "recompute"}\'',
)

#: Rule, what is ill, and then: how bad, a part of the problem, a part of the command.
ILL: Final[list[tuple[str, dict[str, Any], Severity, str, str]]] = [
    (
        "below the mount",
        {"below": Below(1234, 670 << 20, is_whole=False)},
        WARNING,
        "at least 670 MiB in 1234 files",
        'mount --bind / "$d" && ls -lR "$d"/kv; umount "$d"',
    ),
    ("connector limits", connectors(LOCAL_DISK), SERIOUS, "1.17 TiB", "_SIZE=900\n"),
    ("connector limits", connectors(IN_A_FILE), SERIOUS, "of l.yaml", "sed -Ei "),
    (
        "connector limits",
        connectors(LOCAL_DISK._replace(setting="max_capacity_gb", keeps_index=False)),
        WARNING,
        "before the connector does",
        "with max_capacity_gb 900 (in 1 GiB)",
    ),
    (
        "connector limits",
        connectors(
            LOCAL_DISK._replace(limit_bytes=600 * GIB),
            IN_A_FILE._replace(limit_bytes=500 * GIB),
        ),
        WARNING,
        "1.07 TiB together",
        "_SIZE=400\n",
    ),
    (
        "load failures",
        {"habits_of_connectors": (FAILS,)},
        SERIOUS,
        "process 5 (vllm) fails each request",
        "vllm serve MODEL --kv-transfer-config",
    ),
    (
        "databases",
        {"habits_of_connectors": (ConnectorHabit("keeps a database", "process 6 (x)", "/kv/b"),)},
        SERIOUS,
        "it does not open again",
        "setfattr -n user.kvfs.evict -v together /kv/b",
    ),
    (
        "file per key",
        {"habits_of_connectors": (ConnectorHabit("keeps a file per key", "process 6 (x)"),)},
        WARNING,
        "its stores fail when that is reached",
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE=966367641600",
    ),
    (
        "evictable data",
        status(evictable_bytes=GIB, leased_bytes=900 * GIB, pinned_bytes=0),
        SERIOUS,
        "only 1 GiB of it can be evicted (leased 900 GiB)",
        "fuser --verbose --mount /kv",
    ),
    (
        "evictable data",
        status(
            evictable_bytes=None,
            leased_bytes=None,
            states={"published": {"bytes": 2 * GIB}, "slab": {"bytes": 940 * GIB}},
        ),
        SERIOUS,
        "only 2 GiB of it can be evicted (slab 940 GiB)",
        "fuser --verbose --mount /kv",
    ),
    (
        "evictable data",
        status(evictable_bytes=GIB, leased_bytes=9 * GIB, pinned_bytes=800 * GIB),
        SERIOUS,
        "(leased 9 GiB, pinned 800 GiB)",
        "kvfs unpin --all /kv",
    ),
    ("leases", status(leased_bytes=930 * GIB, largest_lease_holder=LESSEE), WARNING, *KEEPS),
    (
        "backing space",
        {**status(used_bytes=100 * GIB), "backing": HOME._replace(free_bytes=200 * GIB)},
        SERIOUS,
        "may still grow by 890 GiB",
        "kvfs umount /kv && kvfs mount --capacity",
    ),
    (
        "index memory",
        status(index_memory={"bytes": 51 * GIB, "free_bytes": 2 * GIB, "full": False}),
        WARNING,
        "has 2 GiB left: when it is full",
        "mount -o remount,size=75% /dev/shm",
    ),
    (
        "index map",
        status(index_used_bytes=55 * GIB),
        WARNING,
        "55 GiB of the 64 GiB",
        "kvfs umount /kv && kvfs mount --set index_map_bytes=137438953472 /data/pool /kv",
    ),
    (
        "hit rate",
        status(cache={**CACHE, "hits": 240, "misses": 2160, "curve": []}),
        WARNING,
        "only 10% of 2,400 lookups found their block, and a larger pool would help little",
        "PYTHONHASHSEED",
    ),
    (
        "hit rate",
        status(cache={**CACHE, "misses": 20_000}),
        WARNING,
        "only 8% of 21,800 lookups found their block; with twice the size 80% would have",
        "kvfs status /kv\nshows what other sizes would bring",
    ),
    (
        "lives of blocks",
        status(cache={**CACHE, **CHURNED}),
        WARNING,
        "used less than 200 s before: 18.55 TiB so far",
        "setfattr -n user.kvfs.evict -v first /kv/batch",
    ),
    (
        "lives of blocks",
        status(cache={**CACHE, **CHURNED, "directories": {}}, eviction={"policy": "lru"}),
        WARNING,
        "of a pool that holds 950 GiB",
        "by directory; or mount it with --set eviction=adaptive, which keeps what is asked for",
    ),
    ("store times", status(store_times=SLOW), WARNING, "longer than 2.5 s", "vmstat 1 5"),
    (
        "store times",
        status(store_times=SLOW, space_waits={"count": 12}),
        WARNING,
        "of the last 5,000; 12 requests waited for space",
        "kvfs status /kv\nshows what keeps the space",
    ),
    ("durability", status(durability={"within_s": 9, "oldest_s": 25}), WARNING, "for 25", "=50"),
    ("damage", status(device_lost="EIO"), SERIOUS, "is lost: EIO", "kvfs mount"),
    ("damage", status(device_silent_s=7.5), SERIOUS, "not answered for 7.5 s", "kill nothing"),
    ("damage", status(write_back_failures=2), SERIOUS, "could not be written", "dmesg"),
    (
        "units",
        status(together={"units": 1, "files": 1025, "bytes": 3 * GIB, "too_large": ["/base"]}),
        WARNING,
        "/base is under evict=together and too large",
        "kvfs evict /kv/base",
    ),
    ("damage", status(damaged_rows=3), WARNING, "3 rows", "kvfs fsck --repair /data/pool"),
    ("damage", status(background_failures=2), WARNING, "2 background jobs", "kvfs fsck --repair"),
    *(
        ("passthrough", {**status(**DAEMON, data_path_reason=why), **FAR}, WARNING, why, fix)
        for why, fix in (
            ("asked for by the setting data_path", "kvfs mount --data-path=auto /data/pool /kv"),
            (
                "no passthrough: Linux 6.1.0 has none",
                "install --yes -t $VERSION_CODENAME-backports",
            ),
            ("no passthrough: stacked itself (overlayfs)", "lsblk --output NAME"),
            ("no passthrough: the server has no CAP_SYS_ADMIN", "--cap-add SYS_ADMIN"),
        )
    ),
    (
        "small reads",
        status(requests={"READ": 50_000}, server_read_bytes=50_000 * 16 * KIB),
        WARNING,
        "16 KiB at a time",
        "kvfs status /kv\n",
    ),
    *ill_servers(STATUS),
    ("NUMA", disks(numa_node=0), WARNING, "may not run there", "--cpu-list --pid 0-7 77"),
    (
        "NUMA",
        {"cpus": Cpus(frozenset(range(16)), {0: frozenset({0, 2, 3}), 1: frozenset({8})})},
        NOTE,
        "nvme0n1 is on NUMA node 1",
        "CPUAffinity=8 by `systemctl edit kvfs@kv.service`",
    ),
    *ILL_DRIVES,
    ("I/O scheduler", disks(scheduler="bfq"), WARNING, "bfq", "echo none > /sys/block/nvme0n1/"),
    (
        "rotating drive",
        disks(is_rotational=True),
        WARNING,
        "rotating",
        "lsblk --output NAME,SIZE,ROTA",
    ),
    (
        "read-ahead",
        {"device_read_ahead": ReadAheadSetting(128 * KIB, "/sys/block/a/queue/read_ahead_kb")},
        WARNING,
        "128 KiB ahead of readers on the drive",
        "echo 4096 > /sys/block/a/queue/read_ahead_kb",
    ),
    (
        "read-ahead",
        status(data_path="daemon"),
        WARNING,
        "128 KiB ahead of readers on the mount",
        "echo 4096 > /sys/class/bdi/0:50/read_ahead_kb",
    ),
    ("dirty limits", {"dirty": Dirty(GIB, 200 * GIB)}, WARNING, "200 GiB", "vm.dirty_bytes="),
    ("dirty limits", {"dirty": Dirty(1, KIB)}, WARNING, "only 1 KiB", "vm.dirty_bytes="),
    ("CPU wake-ups", {"wake": Wake(160.0, None)}, WARNING, "takes 160 us", "cpuidle/state*"),
    ("CPU wake-ups", {"wake": Wake(99.0, 0)}, WARNING, "takes 99 us", "echo 200000 > /sys/module"),
    ("CPU wake-ups", {"wake": Wake(50.0, 200_000)}, WARNING, "takes 50 us", "echo 400000 > /sys"),
    ("page cache", {"zone_reclaim_mode": 1}, WARNING, "is 1", "sysctl -w vm.zone_reclaim_mode=0"),
    (
        "mount options",
        {"backing": HOME._replace(options=frozenset({"rw", "sync"}))},
        WARNING,
        "mounted with sync",
        "mount -o remount,async /data",
    ),
    (
        "mount options",
        {"backing": HOME._replace(options=frozenset({"data=journal"}))},
        WARNING,
        "written twice",
        "umount /data && mount -o data=ordered /dev/nvme0n1 /data && kvfs mount",
    ),
    (
        "mount options",
        {"backing": HOME._replace(options=frozenset({"discard"}))},
        NOTE,
        "own discard",
        "mount -o remount,nodiscard /data",
    ),
    *(
        ("XFS", {"xfs": HEALTHY.xfs._replace(**changed)}, NOTE, problem, fix)
        for changed, problem, fix in (
            ({"inode_bytes": 512}, "inodes of 512 bytes", "mkfs.xfs -f -i size=1024"),
            ({"log_bytes": 10 << 20}, "is 10 MiB", "-l size=256m"),
            ({"has_reflink": True, "has_rmapbt": True}, "reflink and rmapbt", "reflink=0,rmapbt=0"),
        )
        if HEALTHY.xfs is not None
    ),
    (
        "NFS exports",
        {
            "exports": (Export("/kv", "*", frozenset({"rw", "fsid=1"})),),
            **status(root={"uid": 1000, "gid": 0, "mode": "0755"}),
        },
        NOTE,
        "with its root taken for uid 65534",
        ",root_squash,anonuid=1000,anongid=65534,fsid=",
    ),
    *ILL_EXPORTS,
]
