"""What the rules of `kvfs doctor` judge: one snapshot of a mount, its machine and its users.

Pure values, gathered by kvfs/doctor/gather.py. None means that the machine did not show a fact: a
rule that needs it is not decided, and the report says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfs.client.nfs.ganesha import Ganesha
from kvfs.client.nfs.nfsd import Export


class Link(NamedTuple):
    """How a PCI device is connected."""

    speed_gts: float
    """Of one lane, in GT/s."""
    lanes: int

    @property
    def rate(self) -> float:
        """What it carries, to compare it with another one's."""
        return self.speed_gts * self.lanes

    @property
    def text(self) -> str:
        """As ``lspci -vv`` has it."""
        return f"{self.speed_gts:g} GT/s x{self.lanes}"


class Disk(NamedTuple):
    """A drive that holds blocks, as /sys/block shows it (Documentation/block/queue-sysfs.rst)."""

    name: str
    scheduler: str = ""
    """The active one; empty where the driver has none to choose."""
    is_rotational: bool = False
    numa_node: int = -1
    """-1: the machine has one node, or does not say."""
    model: str = ""
    link: Link | None = None
    unit: str = ""
    """What namespaces of one NVMe have in common; empty for other drives."""


class Volume(NamedTuple):
    """A device that is made of several drives."""

    name: str
    level: str
    """md's name, such as ``raid5``; ``raid`` if it is not known which, ``several`` for no RAID."""
    disks: tuple[str, ...]


class Gpu(NamedTuple):
    """A GPU whose NUMA node is known."""

    address: str
    """On the PCI bus."""
    numa_node: int


class ReadAheadSetting(NamedTuple):
    """How far the kernel reads ahead, and the file with the setting."""

    size_bytes: int
    path: str


class DriveBelow(NamedTuple):
    """What a drive of the pool lies on."""

    number: int
    source: str
    disks: tuple[Disk, ...]
    """Empty: memory, or a file system without a drive."""
    volumes: tuple[Volume, ...] = ()
    """Between the drive and its disks."""
    read_ahead: ReadAheadSetting | None = None


class BackingFs(NamedTuple):
    """The file system on which a directory or an image lies."""

    fs_type: str
    options: frozenset[str]
    mountpoint: str
    free_bytes: int
    source: str = ""
    """What is mounted there."""


class Below(NamedTuple):
    """What was stored in the mountpoint's own directory while nothing was mounted there."""

    files: int
    size_bytes: int
    """What they take of the file system below."""
    is_whole: bool
    """Whether all was counted; else there is more."""


class Xfs(NamedTuple):
    """What is in the superblock of an XFS (fs/xfs/libxfs/xfs_format.h)."""

    device: str
    size_bytes: int
    inode_bytes: int
    log_bytes: int
    has_reflink: bool
    has_rmapbt: bool


class Dirty(NamedTuple):
    """The kernel's limits for bytes that are written and not yet on a drive.

    vm.dirty_* (Documentation/admin-guide/sysctl/vm.rst), with shares turned into bytes.
    """

    background_bytes: int
    limit_bytes: int


class Limits(NamedTuple):
    """What the server process may use."""

    open_files: int
    open_files_max: int
    memory_max_bytes: int | None
    """None: no bound."""
    cpus_max: float | None
    """CPUs' worth of time; None: no bound."""
    unit: str
    """Its systemd unit; empty where it runs in none."""
    oom_score_adj: int
    memory_group: str = ""
    """The control group's file with the tightest bound on memory, empty without one."""
    cpu_group: str = ""


class Cpus(NamedTuple):
    """Where the server runs, and which CPUs each NUMA node has."""

    allowed: frozenset[int]
    by_node: Mapping[int, frozenset[int]]


class Wake(NamedTuple):
    """What it costs if one CPU wakes another."""

    round_trip_us: float
    """There and back, as a request and its answer."""
    halt_poll_ns: int | None
    """How long an idle virtual CPU polls; None where no governor polls."""


class NfsMount(NamedTuple):
    """MOUNT is not a kvfs mount, but an NFS mount of one."""

    source: str
    fs_type: str
    options: Mapping[str, str]


class ConnectorLimit(NamedTuple):
    """How many bytes a connector thinks it may keep below the mount."""

    setting: str
    limit_bytes: int
    origin: str
    """Where it was found: ``process 4711 (python)``, a file, a flag."""
    unit_bytes: int = 1
    """How many bytes the number 1 means in the setting."""
    file: str = ""
    """The settings file that says it, empty for an environment variable or a flag."""
    keeps_index: bool = True
    """Whether it trusts its own index, not the disk, and so fails on blocks that kvfs evicted."""


class ConnectorHabit(NamedTuple):
    """What a connector does because of its settings."""

    habit: str
    origin: str
    """Whose it is: ``process 4711 (python)``."""
    command: str = ""
    """The command line to start it with instead; empty if that would not help."""
    is_remote: bool = False
    """Whether another process has the files, which need not lie below the mount."""


@dataclass(frozen=True)
class Facts:
    """The snapshot."""

    mountpoint: str
    source: str = ""
    kind: str = ""
    """``block``, ``image`` or ``directory``; empty if the drives of the pool are not alike."""
    server_pid: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)
    """What the server says; empty for a mount through NFS."""
    limits_of_connectors: tuple[ConnectorLimit, ...] = ()
    habits_of_connectors: tuple[ConnectorHabit, ...] | None = None
    backing: BackingFs | None = None
    below: Below | None = None
    disks: tuple[Disk, ...] | None = None
    """Of all drives of the pool. None: unknown; empty: memory, or a file system without a drive."""
    drives: tuple[DriveBelow, ...] | None = None
    """By number, those that are there. None: one of them is not to be seen."""
    gpus: tuple[Gpu, ...] | None = None
    """None: the machine does not show which there are."""
    device_read_ahead: ReadAheadSetting | None = None
    """The shortest of all drives."""
    fuse_read_ahead: ReadAheadSetting | None = None
    xfs: Xfs | None = None
    dirty: Dirty | None = None
    zone_reclaim_mode: int | None = None
    limits: Limits | None = None
    cpus: Cpus | None = None
    wake: Wake | None = None
    request_timeout_max_s: int | None = None
    """fs.fuse.max_request_timeout; None before Linux 6.15, which has none."""
    exports: tuple[Export, ...] | None = None
    """Of the mount and what is below it; None: this machine serves no NFS."""
    ganeshas: tuple[Ganesha, ...] = ()
    """The NFS-Ganesha servers that run here."""
    nfs: NfsMount | None = None
