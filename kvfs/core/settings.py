"""Every setting of a mount, each with its default and the reason for it.

Pure: text in, a frozen ``Settings`` out, or a UsageError of one line. Which file the text came
from, and whether the paths in it exist, is the caller's business.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any, Final, Self

from kvfs.core.directory_policy import policies_of
from kvfs.core.encryption import parse_encryption
from kvfs.core.entitlements import tenants_table
from kvfs.core.errors import UsageError
from kvfs.core.setting_values import (
    converted,
    default_of,
    setting,
    setting_table,
    share,
    show,
    table_of,
)
from kvfs.core.sizes import GIB, KIB, MIB, TIB
from kvfs.core.types import CAPACITY_MIN_BYTES

_ID_MAX: Final = 2**32 - 2  # (uid_t)-1 means "leave it" to chown(2)
#: Enough for 2 * 256 directories of the pool, and as many files for clients.
OPEN_FILES_MIN: Final = 1024

#: What SIGHUP may change in a running server; the rest needs a new mount.
RELOADABLE: Final = frozenset(
    {
        "log_level",
        "log_lines_per_minute",
        "entry_timeout_s",
        "attr_timeout_s",
        "negative_timeout_s",
        "ready_share",
        "ready_extents_max",
        "stop_timeout_s",
        "tenant_idle_s",
        "tenants",
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one mount; ``None`` and the empty text mean "not set"."""

    source: str = setting("", "must be given: a block device (or UUID=...), image or directory")
    mountpoint: str = setting("", "must be given: an existing directory")
    name: str = setting(
        "", "not set: made from the mountpoint, so that two mounts do not share a control socket"
    )
    capacity_bytes: int | None = setting(
        None,
        "not set: what mkfs was told, else all that SOURCE offers",
        unit="bytes",
        low=CAPACITY_MIN_BYTES,
    )
    encrypt: str = setting(
        "",
        "not set: a blank SOURCE is not encrypted; ephemeral, key-file=FILE or tpm",
        parse=parse_encryption,
    )
    uid: int | None = setting(
        None, "not set: the root directory keeps its owner (0 in a new pool)", low=0, high=_ID_MAX
    )
    gid: int | None = setting(
        None, "not set: the root directory keeps its group (0 in a new pool)", low=0, high=_ID_MAX
    )
    mode: int | None = setting(
        None,
        "not set: the root directory keeps its mode (0755 in a new pool)",
        unit="octal",
        low=0,
        high=0o1777,  # kvfs never stores suid and sgid
    )
    control_group: str = setting(
        "",
        "not set: only root and the server's own user may ask; a group (name or number) whose "
        "members may ask for the status",
    )
    read_only: bool = setting(False, "a read-only cache is useful for inspection only")
    all_drives: bool = setting(
        False, "a pool serves without a drive that is missing: what that held are misses"
    )
    guard: bool = setting(False, "a tried mount leaves its mountpoint as it was; on in the unit")
    fsync: str = setting(
        "relaxed",
        "a block lost at a power loss costs a recompute, an fsync a block costs every store",
        choices=("relaxed", "honour"),
    )
    durable_within_s: float = setting(
        10.0,
        "a power loss takes what was stored in so many seconds before it; 0: never by itself",
        unit="s",
        low=0,
        high=3600,
    )
    durable_queue_max: int = setting(
        65_536,
        "blocks waiting to be durable, 200 B each: half a minute of stores; the rest comes later",
        low=16,
        high=10_000_000,
    )
    data_path: str = setting(
        "auto",
        "passthrough if the kernel has it, else daemon; both behave the same",
        choices=("auto", "passthrough", "daemon"),
    )
    idmapped_mounts: bool = setting(
        False,
        "requests then name no user, who is looked up in /proc at each open to write; on for pods "
        "with hostUsers: false (Linux 6.12)",
    )
    fast_lane: bool = setting(True, "answers quick requests without a coroutine; off to debug")
    compiled_reader: bool = setting(
        True, "compiled code answers opens of blocks that were loaded before; off to debug"
    )

    entry_timeout_s: float = setting(
        3600.0,
        "only kvfs changes names, and tells the kernel when it does",
        unit="s",
        low=0,
        high=86_400,
    )
    attr_timeout_s: float = setting(
        3600.0, "only kvfs changes attributes of published blocks", unit="s", low=0, high=86_400
    )
    negative_timeout_s: float = setting(
        60.0,
        "a miss is asked for again soon; each costs 310 B of kernel memory until it times out",
        unit="s",
        low=0,
        high=600,
    )

    ready_extents_max: int = setting(
        256,
        "each holds an open file; more than a burst of stores needs is waste",
        low=0,
        high=65_536,
    )
    demand_directories_max: int = setting(
        1024,
        "directories whose recent sizes are remembered; others get no ready extents",
        low=1,
        high=1_000_000,
    )
    cache_directories_max: int = setting(
        64, "first-level directories, and models, with figures of their own", low=1, high=4096
    )
    unlink_queue_max: int = setting(
        65_536,
        "extents waiting to be unlinked; above it removals wait for the disk",
        low=1,
        high=10_000_000,
    )
    io_threads: int = setting(
        8,
        "reads and writes of the daemon path in flight: an NVMe drive wants several",
        low=1,
        high=256,
    )
    max_background: int = setting(
        65_535,
        "a RELEASE must be read before what follows the close; the kernel's largest value",
        low=1,
        high=65_535,
    )
    busy_poll_us: int = setting(
        40,
        "wait awake for the next request of a store, which comes within this; 0 sleeps at once",
        unit="us",
        low=0,
        high=1000,
    )
    lease_s: float = setting(
        600.0,
        "a block of a process that cannot be watched (NFS, another pid namespace) stays leased "
        "for so long after its last use",
        unit="s",
        low=0,
        high=86_400,
    )
    foreign_closes: str = setting(
        "doubted",
        "a close in another pid namespace looks like a death: only a rename proves it whole",
        choices=("doubted", "trusted"),
    )
    foreign_close_s: float = setting(
        5.0,
        "time for a rename after such a close; a block not renamed by then is gone",
        unit="s",
        low=0.1,
        high=3600,
    )
    file_servers: str = setting(
        "",
        "not set: nfsd and ganesha.nfsd are known; more programs (comma between) that keep files "
        "open for clients, and read them by read(2), not sendfile(2)",
    )
    file_server_close_s: float = setting(
        5.0,
        "servers may never close; a file not written for so long counts as closed",
        unit="s",
        low=0.1,
        high=3600,
    )
    eviction: str = setting(
        "lru",
        "the plainest, and as good as any in a pool of an eighth of an hour's blocks; adaptive "
        "finds more in a smaller one, for some memory (docs/eviction.md)",
        choices=("lru", "arc", "adaptive", "gate"),
    )
    probation_bytes: int = setting(
        0,
        "off: a power loss takes what is in memory, however long ago it was stored",
        unit="bytes",
        low=0,
        high=TIB,
    )
    write_budget_bytes: int = setting(
        0,
        "off: no bound; what a drive may be written a day depends on it (docs/eviction.md)",
        unit="bytes",
        low=0,
        high=1024 * TIB,
    )
    prefetch: str = setting(
        "off",
        "whether it pays is not measured yet, and depends on the load (docs/eviction.md)",
        choices=("off", "learned"),
    )
    notifications: bool = setting(
        True, "evicted names leave the kernel's cache; off only to show that nothing depends on it"
    )
    room_wait_s: float = setting(
        5.0,
        "longest wait for space; a longer one looks like a hung call",
        unit="s",
        low=0,
        high=60,
    )
    room_wait_bytes: int = setting(
        512 * MIB,
        "of writes that wait for space in memory; one more is refused",
        unit="bytes",
        low=MIB,
    )
    backing_ids_max: int = setting(
        16_384,
        "1.7 KiB of kernel memory each, which nothing else can free",
        low=16,
        high=1_000_000,
    )
    open_files_max: int = setting(
        1_048_576,
        "every open block is an open extent; the kernel's default hard limit",
        low=OPEN_FILES_MIN,
        high=1_073_741_816,
    )
    open_files_user_share: float = setting(
        0.5,
        "largest share of the open files for clients that one tenant (not root) may have",
        unit="share",
        low=0.01,
        high=1,
    )
    subuid_file: str = setting(
        "/etc/subuid",
        "ranges of uids that are one tenant (docs/tenants.md); empty: each uid is one",
    )
    tenant_idle_s: float = setting(
        3600.0,
        "who has not used a block for so long has no share that others must leave; 0: always has",
        unit="s",
        low=0,
        high=31_536_000,
    )
    oom_score_adj: int = setting(
        -900, "its death stalls every client, and it uses little memory", low=-1000, high=1000
    )

    policies: Mapping[str, Mapping[str, str]] = setting_table(
        'none: what connectors do says enough; [policies."/DIR"] in the settings file', policies_of
    )
    tenants: Mapping[str, Mapping[str, str]] = setting_table(
        'none: all share alike; [tenants.USER] or [tenants."/DIR"] in the settings file, with '
        "quota and weight",
        tenants_table,
    )
    start_timeout_s: float = setting(
        900.0,
        "enough for mkfs of a large drive and for a rebuild of the index",
        unit="s",
        low=1,
        high=86_400,
    )
    stop_timeout_s: float = setting(
        60.0, "enough for the last sync of a busy drive", unit="s", low=1, high=3600
    )
    silent_max_s: float = setting(
        60.0, "a server that hangs so long is killed; 0: never", unit="s", low=0, high=3600
    )
    device_silent_s: float = setting(
        5.0, "drives answer in milliseconds, busy disks within seconds", unit="s", low=1, high=600
    )
    device_deadline_s: float = setting(
        30.0, "a load may wait for a drive that is reset meanwhile", unit="s", low=1, high=3600
    )

    # ---- the index, and what attributes may take of it ----

    index_map_bytes: int = setting(
        64 * GIB,
        "address space only; a name takes some 550 bytes, and if it is full blocks are evicted",
        unit="bytes",
        low=16 * MIB,
        high=16 * TIB,
    )
    index_preallocate_bytes: int = setting(
        8 * MIB,
        "allocated ahead of use, because deletes need space in the index even if nothing is free",
        unit="bytes",
        low=MIB,
        high=64 * GIB,
    )
    index_place: str = setting(
        "memory",
        "names wait for no drive; in the pool, if it is too large for that",
        choices=("memory", "pool"),
    )
    index_memory_dir: str = setting(
        "/dev/shm",
        "the tmpfs that every Linux has, for up to half of the memory (tmpfs(5))",
    )
    index_log_s: float = setting(
        1.0,
        "how much of the index a power loss takes back; 0: no log, so that it is rebuilt",
        unit="s",
        low=0,
        high=86_400,
    )
    xattr_value_max_bytes: int = setting(
        4 * KIB,
        "user xattrs live in the index, which is for names",
        unit="bytes",
        low=0,
        high=64 * KIB,
    )
    xattr_total_max_bytes: int = setting(
        16 * KIB,
        "per inode, names and values together: the index is for names",
        unit="bytes",
        low=0,
        high=1024 * KIB,
    )

    # ---- checksums, and files that are kept aside ----

    checksum_share: float = setting(
        0.1,
        "largest share of a core for checksums of what was stored; blocks beyond it get none",
        unit="share",
        low=0,
        high=1,
    )
    checksum_stop_s: float = setting(
        2.0,
        "how long a stop may go on making checksums of what it makes durable; the rest gets none",
        unit="s",
        low=0,
        high=600,
    )
    verify: str = setting(
        "doubtful",
        "blocks of before a power loss are compared with their checksum at their first open; open: "
        "all blocks of before the start, and what is not in the page cache is read for its "
        "checksum; scrub: also all others, again and again, and those without a checksum get one; "
        "off: none",
        choices=("off", "doubtful", "open", "scrub"),
    )
    scrub_bytes_per_s: int = setting(
        32 * MIB,
        "a terabyte in nine hours; only while clients do not store",
        unit="bytes",
        low=MIB,
        high=64 * GIB,
    )
    quarantine_files_max: int = setting(
        16, "blocks with wrong bytes that are kept for a look; 0: none", low=0, high=1024
    )
    quarantine_bytes: int = setting(
        256 * MIB,
        "largest sum of their sizes: they take room from blocks",
        unit="bytes",
        low=0,
        high=64 * GIB,
    )
    stray_grace_s: float = setting(
        86_400.0,
        "a day: files without a name after an unclean start wait, if nobody needs their room",
        unit="s",
        low=0,
        high=31_536_000,
    )
    strays_max: int = setting(
        65_536,
        "such files at once, 200 B each; for one more the oldest goes",
        low=0,
        high=10_000_000,
    )

    # ---- shares of the pool: how much of it one use may take from all others ----

    lease_max: float = share(
        0.92,
        "of the capacity under leases: connectors with an index keep 90 %, others need the rest",
    )
    pin_share: float = share(
        0.5, "of the capacity kept by pins and evict=never: the rest must be evictable"
    )
    together_max: float = share(
        0.25, "of the capacity for one unit of evict=together: the rest must go bit by bit"
    )
    length_share: float = share(
        0.5,
        "of the capacity for open files that were set to a length, until they are written: a store "
        "through a mapping that finds no space ends its process",
    )
    old_versions_share: float = share(
        0.25,
        "of the capacity for old versions of rewritten blocks that are still read: beyond it the "
        "rewriter gets ENOSPC, and others do not",
    )
    ready_share: float = setting(
        0.05,
        "largest share of the capacity in extents that nobody has written yet",
        unit="share",
        low=0,
        high=0.5,
    )
    file_server_passthrough_max: float = share(
        0.5, "of the capacity that servers may have open on passthrough, where no eviction frees it"
    )
    directory_reserve_share: float = setting(
        0.05,
        "share of the parent file system that a directory source leaves to others",
        unit="share",
        low=0,
        high=0.9,
    )
    directory_reserve_bytes: int = setting(
        10 * GIB,
        "upper limit of directory_reserve_share on a large file system",
        unit="bytes",
        low=0,
        high=1024 * TIB,
    )

    # ---- log, metrics and events ----

    log_file: str = setting("", "not set: syslog or the journal, else /var/log/kvfs/NAME.log")
    log_level: str = setting(
        "info",
        "starts, stops and refusals are worth a line each; requests are not",
        choices=("debug", "info", "warning", "error", "off"),
    )
    log_lines_per_minute: int = setting(
        20, "of each kind, so that a repeated error does not fill the journal", low=1, high=60_000
    )

    metrics_socket_mode: int = setting(
        0o666,
        "for every user of the host: metrics hold counts and paths, and no block data",
        unit="octal",
        low=0o600,
        high=0o666,
    )
    metrics_port: int | None = setting(
        None,
        "not set: only the socket /run/kvfs/NAME.metrics; a port of 127.0.0.1 for scrapers that "
        "know no sockets",
        low=1,
        high=65_535,
    )
    metrics_textfile: str = setting(
        "", "not set; a path that ends in .prom, where node_exporter's textfile collector looks"
    )
    metrics_textfile_s: float = setting(
        15.0, "interval of that file: as often as scrapers usually ask", unit="s", low=1, high=3600
    )
    history_step_s: float = setting(
        300.0,
        "289 samples are kept for `kvfs report`: with this step a day",
        unit="s",
        low=0,
        high=86_400,
    )
    events_socket_mode: int = setting(
        0o600,
        "for root and the server's own user: events hold names of blocks, which tell what is asked",
        unit="octal",
        low=0o600,
        high=0o666,
    )
    hints_socket_mode: int = setting(
        0o666,
        "for every user of the host: each hint is checked against the rights on the files",
        unit="octal",
        low=0o600,
        high=0o666,
    )

    @classmethod
    def from_toml(
        cls, text: str, overrides: Mapping[str, object] | None = None, *, origin: str = "settings"
    ) -> Self:
        """Return the settings of TOML *text*, with *overrides* (flags) on top.

        An override of ``None`` is a flag that was not given. *origin* names the file in errors.
        Raises UsageError on bad TOML, an unknown key or a value out of range.
        """
        values = converted(_FIELDS, table_of(text, origin), origin)
        given = {key: value for key, value in (overrides or {}).items() if value is not None}
        values.update(converted(_FIELDS, given, "command line"))
        settings = cls(**values)
        judged = settings.eviction == "gate" and settings.probation_bytes
        if settings.write_budget_bytes and not judged:
            raise UsageError(
                'write_budget_bytes needs eviction = "gate" and probation_bytes: '
                "else all is written at once"
            )
        return settings

    def reloaded(self, fresh: Self) -> tuple[Self, list[str]]:
        """Return these settings with the RELOADABLE ones of *fresh*, and a list of names.

        The list names the settings that differ but take effect only in a new mount.
        """
        differing = [name for name in _FIELDS if getattr(self, name) != getattr(fresh, name)]
        taken = {name: getattr(fresh, name) for name in differing if name in RELOADABLE}
        return replace(self, **taken), [name for name in differing if name not in RELOADABLE]

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return (name, value, default, reason) of every setting, for a reader."""
        return [
            (
                name,
                show(declared, getattr(self, name)),
                show(declared, default_of(declared)),
                declared.metadata["reason"],
            )
            for name, declared in _FIELDS.items()
        ]


_FIELDS: Final[dict[str, Field[Any]]] = {declared.name: declared for declared in fields(Settings)}
