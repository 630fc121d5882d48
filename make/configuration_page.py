"""docs/configuration.md, made from the table of settings.

Defaults, values and what a reload may change come from the table itself; the words for a reader
are here. ``python -m make.configuration_page`` writes the page; a test holds it equal
(tests/core/test_configuration_page.py).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.core.setting_values import default_of, show
from kvfs.core.settings import RELOADABLE, Settings

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_FIELDS: Final = {declared.name: declared for declared in dataclasses.fields(Settings)}
_UNITS: Final = {"seconds": "s"}

_HEAD: Final = """\
# Configuration

<!-- Made by `python -m make.configuration_page` from the table of settings. Change it there. -->

Every setting of a mount. The defaults fit most hosts: a mount needs `source` and `mountpoint`, and
most hosts change at most the capacity, the owner of the root directory, and the metrics.

## Where a setting is made

A file `/etc/kvfs/NAME.toml` holds the settings of one mount, a line each (TOML). NAME is made from
the mountpoint: `kv` for `/kv`.

```toml
source = "/dev/nvme0n1"
mountpoint = "/kv"
capacity_bytes = "500G"

[policies."/lmcache"]
ttl = "7d"

[tenants.alice]
quota = "100G"
weight = 3
```

- A flag of `kvfs mount` goes over the file: `--capacity`, `--encrypt`, `--fsync`, `--data-path`,
  `--guard`, `--all-drives`, `-o uid=1000,gid=1000,mode=0755`, and `--set NAME=VALUE` for every
  setting.
- In fstab each setting is an option: `capacity_bytes=500G`.
- `kvfs mount --print-settings` shows what is in force, and why each default is what it is. The page
  `man kvfs.conf` tells the same.
- A wrong name or value is refused with one line and exit code 2, before anything is touched.

**Units.** A name that ends in `_s` is in seconds, `_us` in microseconds, `_bytes` in bytes. Sizes
may be written as text, such as `"500G"`; G and GiB are the same. A *share* is a number from 0 to 1.
Modes are octal: `"0755"`.

**After a change.** Settings that are marked *reload* apply at `systemctl reload kvfs@kv` (SIGHUP),
while the mount serves. All others need a new mount: `systemctl restart kvfs@kv`. The log names what
a reload did not apply.
"""


class Words(NamedTuple):
    """What a setting means, and when it is changed."""

    meaning: str
    change: str


_SELDOM: Final = "hardly ever"
_DEBUG: Final = "only to look for a fault"

#: Every setting, in the order of the page.
GROUPS: Final[dict[str, dict[str, Words]]] = {
    "What is mounted, and where": {
        "source": Words(
            "where the pool is: a drive, an image file, or a directory on XFS, ext4 or tmpfs; "
            "several drives of one with commas between; or `UUID=` and the pool's UUID",
            "must be set",
        ),
        "mountpoint": Words("the directory at which it is served", "must be set"),
        "name": Words(
            "the name of the mount in commands, logs, sockets and metrics",
            "if the name that is made from the mountpoint is too long or not clear",
        ),
        "capacity_bytes": Words(
            "most bytes that all blocks may take together",
            "to leave a part of the drive to others, or to flash for its own wear levelling",
        ),
        "encrypt": Words(
            "how a blank source is encrypted, and how an encrypted one is opened",
            "where whoever gets the drive must not read what is on it ([security.md](security.md))",
        ),
        "uid": Words("owner of the root directory", "if connectors do not run as root"),
        "gid": Words("group of the root directory", "the same"),
        "mode": Words("mode of the root directory", "the same"),
        "read_only": Words("nothing can be stored", "to look at a pool without changing it"),
        "all_drives": Words(
            "a pool of several drives is mounted only if all are there (`--all-drives`)",
            "to mend a drive that is missing before its blocks are misses",
        ),
        "guard": Words(
            "the bare mountpoint takes no files while nothing is mounted (`chattr +i`)",
            "set it on hosts that serve; the systemd unit does",
        ),
        "idmapped_mounts": Words(
            "clones of the mount may have mapped ids (Linux 6.12); kvfs looks up in /proc who asks",
            "for pods with `hostUsers: false`, or `mount -o X-mount.idmap`",
        ),
        "control_group": Words(
            "group whose members may run `kvfs status`; the sockets of metrics and events have it",
            "if who watches is not root",
        ),
        "policies": Words(
            "policies of directories by path: `evict`, `pin`, `lease`, `ttl`, `publish`, `drafts`",
            "to set them before a connector has made the directory; else use setfattr(1)",
        ),
    },
    "Which blocks stay": {
        "eviction": Words(
            "which block goes first: the one not used for longest (lru); adaptive and arc also "
            "weigh how often it was used; gate also judges what is worth a write "
            "([eviction.md](eviction.md))",
            "adaptive, if `kvfs status` shows that blocks go within minutes",
        ),
        "probation_bytes": Words(
            "memory for new blocks, which are written to the drive when they are used again "
            "([probation.md](probation.md)); 0: all are written at once",
            "a few GiB, where most blocks are never asked for and writes wear the drive out",
        ),
        "write_budget_bytes": Words(
            'what may be written to the drives a day: with `eviction = "gate"` and '
            "`probation_bytes` fewer blocks are worth a write, as it asks "
            "([eviction.md](eviction.md)); 0: no bound",
            "what the drive bears: its endurance by the years that it should last",
        ),
        "prefetch": Words(
            "learned: the blocks that followed the one that is opened are read into memory ahead",
            "learned, if `kvfs status` then shows more blocks of `prefetch` used than wasted",
        ),
        "lease_max": Words(
            "largest share of the capacity under leases of living processes",
            "lower, if blocks that are renamed are large beside 4 % of the capacity",
        ),
        "pin_share": Words(
            "largest share of the capacity kept by pins and `evict=never`",
            "to keep more; 1 keeps all that is pinned, and then the pool may be full",
        ),
        "together_max": Words(
            "largest share of the capacity for one unit of `evict=together`; a larger one is none",
            "more, if one database or one pool with its index is most of what is stored",
        ),
        "lease_s": Words(
            "for how long a block stays leased to a process that cannot be watched (NFS, another "
            "pid namespace)",
            "shorter, if such clients come and go and their leases fill the pool",
        ),
        "length_share": Words(
            "largest share for open files that were set to a length and are not written yet",
            "higher, if one store through a mapping is larger than half of the pool",
        ),
        "old_versions_share": Words(
            "largest share for the former bytes of rewritten blocks that are still read",
            "higher, if rewriting fails with ENOSPC under long reads",
        ),
        "file_server_passthrough_max": Words(
            "largest share that NFS servers may have open on passthrough",
            "lower, if local stores wait for space that clients of NFS hold",
        ),
        "directory_reserve_share": Words(
            "share of the file system that a directory as source leaves to others",
            "0, if nobody else writes to that file system",
        ),
        "directory_reserve_bytes": Words(
            "at most so much is left to others, however large the file system is",
            "if others need more than that",
        ),
    },
    "What survives a power loss": {
        "durable_within_s": Words(
            "a power loss takes what was stored in the last so many seconds",
            "longer, if `kvfs doctor` reports that the drive does not keep pace",
        ),
        "fsync": Words(
            "what fsync(2) does: return at once (relaxed), or wait for the drive (honour)",
            "honour, for a program whose fsync must mean what it says; each costs a flush",
        ),
        "index_log_s": Words(
            "how often what the index was told goes to its log on the drive; 0: there is no log",
            "hardly ever: what a power loss takes of the log is found again by comparison",
        ),
        "durable_queue_max": Words("blocks that may wait to be durable", _SELDOM),
        "verify": Words(
            "when blocks are compared with their checksums: after a power loss (doubtful), always "
            "at the first open after a start (open), also in the background (scrub), never (off)",
            "open or scrub, for drives that may lose what they acknowledged",
        ),
        "checksum_share": Words(
            "share of a core that checksums may take; blocks beyond it get none",
            "1 with `verify=open`, so that each block has one; 0 to have none",
        ),
        "checksum_stop_s": Words(
            "how much longer a stop may take for checksums of the last blocks",
            "0, if a stop must be quick",
        ),
        "scrub_bytes_per_s": Words(
            "most that the scrub reads", "by how much the drive can spare and how often all is read"
        ),
        "quarantine_files_max": Words(
            "blocks with wrong bytes that are kept for a look", "0, to keep none"
        ),
        "quarantine_bytes": Words("most bytes of them", "if the blocks are larger than that"),
        "stray_grace_s": Words(
            "how long files without a name are kept after an unclean start",
            "longer, to look at them later; if the pool needs room they go earlier",
        ),
        "strays_max": Words("most such files", _SELDOM),
    },
    "How bytes move": {
        "data_path": Words(
            "who moves the bytes: the kernel (passthrough), the server (daemon), or the first if "
            "the kernel can (auto)",
            "passthrough, to have the mount fail where only the slow path is possible",
        ),
        "busy_poll_us": Words(
            "how long the server waits awake for the next request of a store",
            "100 on virtual machines that may not halt-poll; 0 to save CPU",
        ),
        "io_threads": Words(
            "reads and writes of the daemon path at once",
            "higher, for several drives without passthrough",
        ),
        "room_wait_s": Words(
            "longest wait of a store for space",
            "higher, if large blocks are loaded on the daemon path from a pool of few blocks",
        ),
        "room_wait_bytes": Words(
            "bytes of writes that may wait for space in memory",
            "if `space_waits.rejected` of `kvfs status` grows",
        ),
        "ready_share": Words(
            "largest share of the capacity in files that are prepared for the next stores", _SELDOM
        ),
        "ready_extents_max": Words(
            "most such files", "higher, if stores come in bursts of more than that"
        ),
        "demand_directories_max": Words(
            "directories whose usual block size is remembered",
            "higher, if a connector stores into more directories at once",
        ),
        "unlink_queue_max": Words("removed blocks that may wait for the disk", _SELDOM),
        "max_background": Words("requests that the kernel may have under way", _SELDOM),
        "fast_lane": Words("quick requests are answered without a coroutine", _DEBUG),
        "compiled_reader": Words(
            "compiled code answers opens of blocks that were loaded before, where it was installed",
            _DEBUG,
        ),
    },
    "What the kernel remembers": {
        "entry_timeout_s": Words(
            "how long the kernel trusts a name that it found",
            "lower, to see more lookups as uses: the kernel answers the others itself",
        ),
        "attr_timeout_s": Words("how long it trusts size and times", _SELDOM),
        "negative_timeout_s": Words(
            "how long it trusts that a name is missing",
            "lower, if millions of names are asked for that are not there: 310 B each",
        ),
        "notifications": Words("the kernel is told of evicted names", _DEBUG),
        "backing_ids_max": Words(
            "opened blocks that the kernel keeps registered for passthrough",
            "lower, on a host with little kernel memory: 1.7 KiB each",
        ),
    },
    "Who may use how much": {
        "open_files_max": Words(
            "files that the server may have open",
            "higher, if `kvfs doctor` says that they run out",
        ),
        "open_files_user_share": Words(
            "largest share of them for one tenant ([tenants.md](tenants.md)) who is not root",
            "1, if all connectors run as one user and need more than half",
        ),
        "subuid_file": Words(
            "file with ranges of uids that are one tenant (subuid(5)); empty: each uid is one",
            "if ranges of the host are no users of their own, such as those that pods get",
        ),
        "tenants": Words(
            "what users may store, by name or uid, and directories such as `/team-a` "
            "([tenants.md](tenants.md)): `quota`, a size, and `weight`, their part of the pool "
            "beside others'",
            "if one is to have more than others, or never more than so much",
        ),
        "tenant_idle_s": Words(
            "after so long without a use of its blocks a tenant has no share of the pool",
            "higher, if tenants pause for longer and should find their blocks again; 0: never",
        ),
        "oom_score_adj": Words(
            "how soon the kernel ends the server when memory is short (-1000: never)", _SELDOM
        ),
        "xattr_value_max_bytes": Words("longest value of a user attribute", _SELDOM),
        "xattr_total_max_bytes": Words("all user attributes of one file together", _SELDOM),
    },
    "The index": {
        "index_map_bytes": Words(
            "address space of the index: some 550 bytes a name",
            "higher, for more than 100 million names",
        ),
        "index_preallocate_bytes": Words("how far ahead its file is allocated", _SELDOM),
        "index_place": Words(
            "where the index is while the pool is served: in memory, or in the pool",
            "pool, if memory is short: names then wait for the drive when it does not answer",
        ),
        "index_memory_dir": Words(
            "the tmpfs for an index in memory",
            "another one, if that is too small, as in many containers",
        ),
    },
    "Clients that kvfs cannot watch": {
        "foreign_closes": Words(
            "whether a close in another pid namespace (a container) proves a block whole",
            "trusted, if containers store without a rename and cannot share the host's pid "
            "namespace; a writer that is killed then leaves a part of a block",
        ),
        "foreign_close_s": Words(
            "time for the rename after such a close", "longer, if a connector renames later"
        ),
        "file_servers": Words(
            "programs besides nfsd and Ganesha that keep files open for clients",
            "if another file server exports the mount",
        ),
        "file_server_close_s": Words(
            "a file of a file server that was not written for so long counts as closed",
            "longer, if clients pause in the middle of a store",
        ),
    },
    "Start and stop": {
        "start_timeout_s": Words(
            "a start that shows no progress for so long has failed",
            "longer, for a drive that takes long to format",
        ),
        "stop_timeout_s": Words(
            "how long `kvfs umount` waits for the server to stop",
            "longer, if a drive takes long to write the rest; `TimeoutStopSec` of the unit, too",
        ),
        "silent_max_s": Words(
            "a server that does not answer for so long is killed, and another takes over",
            "0, to look at it with a debugger (also `WatchdogSec=0` in the unit)",
        ),
        "device_silent_s": Words(
            "a device that does not answer for so long is called silent",
            "longer, if the device is remote and may be away for a while",
        ),
        "device_deadline_s": Words(
            "an open, or a read on the daemon path, that waits so long for the device fails (EIO)",
            "shorter, if the program that loads has no timeout of its own",
        ),
    },
    "What it tells": {
        "log_file": Words("a file for the log", "if there is neither journal nor syslog"),
        "log_level": Words("what is logged", "debug, while you look for a fault"),
        "log_lines_per_minute": Words("most lines of one kind", "higher, with debug"),
        "metrics_socket_mode": Words(
            "mode of the socket with the metrics", "`0600` or `0660`, to keep them from other users"
        ),
        "metrics_port": Words(
            "port of 127.0.0.1 with the same", "for a scraper that knows no sockets"
        ),
        "metrics_textfile": Words("file with the same", "for node_exporter's textfile collector"),
        "metrics_textfile_s": Words("how often it is written", "by how often it is scraped"),
        "history_step_s": Words(
            "how often the cache's counters are kept for `kvfs report`; 0: never",
            "higher, for more than a day",
        ),
        "events_socket_mode": Words(
            "mode of the socket with the events",
            "`0660`, so that a router in `control_group` can listen",
        ),
        "hints_socket_mode": Words(
            "mode of the socket that takes hints",
            "`0660`, so that only `control_group` can send some",
        ),
        "cache_directories_max": Words(
            "directories of the first level, and models, that have figures of their own",
            "higher, if more models are served",
        ),
    },
}


def page() -> str:
    """Return the text of docs/configuration.md."""
    lines = [_HEAD]
    for title, settings in GROUPS.items():
        lines += [f"## {title}", "", *_table(settings), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(settings: Mapping[str, Words]) -> Iterator[str]:
    yield "| setting | default | values | what it is | when to change it |"
    yield "|---|---|---|---|---|"
    for name, words in settings.items():
        declared = _FIELDS[name]
        reload = " (*reload*)" if name in RELOADABLE else ""
        default = _shown(declared, default_of(declared))
        cells = (f"`{name}`{reload}", default, _values(declared), words.meaning, words.change)
        yield f"| {' | '.join(cells)} |"


def _shown(declared: "dataclasses.Field[Any]", value: object) -> str:
    """Return *value* with its unit."""
    if value in (None, "", {}):
        return "not set"
    unit = _UNITS.get(declared.metadata["unit"])
    number = f"{value:g}" if isinstance(value, float) else ""
    if unit or number:
        unit = unit or declared.metadata["unit"].replace("share", "")
        return f"{number or value} {unit}".rstrip()
    return show(declared, value)


def _values(declared: "dataclasses.Field[Any]") -> str:
    """Return what it may be, such as ``0 s to 60 s``."""
    if words := words_of(declared):
        return ", ".join(f"`{word}`" for word in words)
    if kind := kind_of(declared):
        return kind
    low, high = (declared.metadata[end] for end in ("low", "high"))
    if low is None or high is None:
        return f"{_bound(declared, low)} or more"
    return f"{_bound(declared, low)} to {_bound(declared, high)}"


def words_of(declared: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Return the words that it may be; none if it is no choice."""
    is_switch = declared.type in (bool, "bool")
    return ("true", "false") if is_switch else tuple(declared.metadata["choices"] or ())


def kind_of(declared: "dataclasses.Field[Any]") -> str:
    """Return ``text`` or ``table``; "" for a number."""
    kind = declared.type.__name__ if isinstance(declared.type, type) else str(declared.type)
    if kind.startswith("str"):
        return "text"
    return "table" if "Mapping" in kind else ""


def _bound(declared: "dataclasses.Field[Any]", value: float) -> str:
    whole = declared.metadata["unit"] in ("bytes", "octal")
    return _shown(declared, int(value) if whole else value)


if __name__ == "__main__":
    PAGE.write_text(page())
