"""The table of metrics: each with its name, its kind, and the status key that it comes from.

Names follow Prometheus' conventions, which promtool checks in the tests: base units, ``_total``
for counters. docs/metrics.md lists the same table for a reader.
"""

from typing import Final

from mount.control.metrics.cache_families import CACHE_FAMILIES
from mount.control.metrics.family import Family
from mount.control.metrics.family import counter as _counter
from mount.control.metrics.family import gauge as _gauge
from mount.control.metrics.family import histogram as _histogram

_LATENCY: Final = (
    _histogram(
        "store_duration_seconds", "store_times", "From CREATE until the block is whole and visible"
    ),
    _histogram(
        "request_duration_seconds",
        "request_times.*",
        "From reading a request to its answer; one in 61 of each kind is timed",
        "op",
    ),
)

_SPACE: Final = (
    _gauge("capacity_bytes", "capacity_bytes", "Capacity of the pool"),
    _gauge("missing_drives", "missing_drives", "Drives that are missing or have failed"),
    _gauge("drive_capacity_bytes", "drives.*.capacity_bytes", "Of it on this drive", "drive"),
    _gauge("drive_used_bytes", "drives.*.used_bytes", "Held there by blocks", "drive"),
    _gauge("drive_blocks", "drives.*.blocks", "Blocks there", "drive"),
    _counter("drive_opens", "drives.*.opens", "Opens of its blocks to read", "drive"),
    _counter("drive_stores", "drives.*.stores", "Blocks that were stored there", "drive"),
    _counter("drive_errors", "drives.*.errors", "Failures that were found there", "drive"),
    _gauge(
        "drive_slowest_probe_seconds", "drives.*.slowest_probe_s", "Its slowest answer", "drive"
    ),
    _counter("drive_written_bytes", "drives.*.written_bytes", "Written to it", "drive"),
    _gauge("drive_endurance_left_ratio", "drives.*.endurance_left", "Its endurance left", "drive"),
    _gauge("drive_endurance_left_bytes", "drives.*.endurance_left_bytes", "In bytes", "drive"),
    _gauge("usable_bytes", "usable_bytes", "What the device can give to blocks now"),
    _gauge("used_bytes", "used_bytes", "Held by blocks"),
    _gauge("free_bytes", "free_bytes", "Usable and not used"),
    _gauge("evictable_bytes", "evictable_bytes", "What eviction may free now"),
    _gauge("leased_bytes", "leased_bytes", "Owned by the living processes that wrote them"),
    _gauge("lease_limit_bytes", "lease_max_bytes", "Limit of all leases together"),
    _gauge("slab_bytes", "slab_bytes", "Slabs of living processes"),
    _gauge("pinned_bytes", "pinned_bytes", "Pinned, or under evict=never"),
    _gauge("probation_blocks", "probation.blocks", "New blocks that are in memory alone"),
    _gauge("probation_bytes", "probation.bytes", "What they hold: lost with the machine"),
    _gauge("probation_room_bytes", "probation.room_bytes", "How much they may hold now"),
    _gauge("gate_threshold", "gate.threshold", "Hits that a new block must be worth"),
    _gauge("gate_classes", "gate.classes", "Kinds of blocks whose rate of return is known"),
    _gauge("gate_hits_a_block", "gate.hits_a_block", "Hits that a block brought lately"),
    _gauge("gate_budget_bytes", "gate.budget_bytes", "What may be written a day; 0: no bound"),
    _gauge("gate_price", "gate.price", "Hits that the budget asks of a new block"),
    _gauge("gate_used_hour_ratio", "gate.used_hour", "Part of the budget's rate used lately"),
    _gauge("gate_used_day_ratio", "gate.used_day", "The same of the last day"),
    _gauge("gate_lasts_days", "gate.lasts_days", "How long the drives last at that rate"),
    _gauge("retained_bytes", "hints.retained_bytes", "Kept longer by hints; may be evicted"),
    _gauge("prefetch_links", "prefetch.links", "Blocks of which it is known what follows"),
    _gauge("prefetch_link_bytes", "prefetch.link_bytes", "Memory that this takes"),
    _gauge("units", "together.units", "Directories under evict=together"),
    _gauge("unit_bytes", "together.bytes", "What the first of them hold"),
    _gauge("held_blocks", "held_by.*.blocks", "Blocks of this program and model", "holder"),
    _gauge("held_bytes", "held_by.*.bytes", "What they hold", "holder"),
    _gauge("tenant_stored_bytes", "tenants.*.stored_bytes", "Blocks of this tenant", "tenant"),
    _gauge("tenant_held_bytes", "tenants.*.held_bytes", "What it keeps from eviction", "tenant"),
    _gauge("tenant_slab_bytes", "tenants.*.slab_bytes", "Of these slabs", "tenant"),
    _gauge("tenant_leased_bytes", "tenants.*.leased_bytes", "Of these leased", "tenant"),
    _gauge("tenant_pinned_bytes", "tenants.*.pinned_bytes", "Of these pinned", "tenant"),
    _gauge("tenant_names_bytes", "tenants.*.names_bytes", "Its names that stay", "tenant"),
    _gauge("tenant_weight", "tenants.*.weight", "Its weight beside others'", "tenant"),
    _gauge("tenant_quota_bytes", "tenants.*.quota_bytes", "The most it may store", "tenant"),
    _gauge("tenant_share_bytes", "tenants.*.share_bytes", "What others must leave it", "tenant"),
    _gauge("tenant_open_files", "tenants.*.open_files", "Its open files that count", "tenant"),
    _gauge("tenant_waiting_bytes", "tenants.*.waiting_bytes", "What its waits hold", "tenant"),
    _gauge("tenant_device_waits", "tenants.*.device_waits", "Its waits for a drive", "tenant"),
    _gauge("open_bytes", "open_bytes", "Files that are open"),
    _gauge("opener_bytes", "open_by.*.bytes", "Of them, by who has them open", "opener"),
    _gauge("largest_lease_holder_bytes", "largest_lease_holder.bytes", "Most leases of a process"),
    _gauge("preallocated_bytes", "preallocated_bytes", "Extents prepared for the next files"),
    _gauge("pending_delete_bytes", "pending_delete_bytes", "Deleted, not yet given back"),
    _gauge("deleted_open_bytes", "deleted_open_bytes", "Deleted, still open or mapped"),
    _gauge("old_version_bytes", "old_version_bytes", "Rewritten since, still read"),
    _gauge("headroom_bytes", "headroom_bytes", "Kept free ahead of writers"),
    _gauge("overcommitted_bytes", "overcommitted_bytes", "Beyond the capacity"),
    _gauge(
        "largest_unevictable_directory_bytes",
        "largest_unevictable.bytes",
        "Most bytes in one directory that cannot be evicted",
    ),
)

_BLOCKS: Final = (
    _gauge("blocks", "blocks", "Regular files"),
    _gauge("directories", "directories", "Directories"),
    _gauge("symlinks", "symlinks", "Symlinks"),
    _gauge("state_blocks", "states.*.blocks", "Blocks in this state of their life", "state"),
    _gauge("state_bytes", "states.*.bytes", "What they hold", "state"),
    _gauge("index_used_bytes", "index_used_bytes", "Rows in the index"),
    _gauge("index_limit_bytes", "index_map_bytes", "Most that the index may hold"),
    _gauge("open_files", "open_inodes", "Files that are open"),
    _gauge("opener_files", "open_by.*.files", "Of them, by who has them open", "opener"),
    _gauge("open_handles", "open_handles", "Open file descriptions of files and directories"),
    _gauge("recently_deleted_files", "recently_deleted", "Deleted during the last second or so"),
    _gauge("preallocated_extents", "preallocated_extents", "Extents prepared for new files"),
    _counter("preallocated_hits", "preallocated_hits", "Files created on a prepared extent"),
    _counter("preallocated_misses", "preallocated_misses", "Files created when none was there"),
)

_WORK: Final = (
    _counter("probation_stored", "probation.stored", "Blocks that were stored into memory"),
    _counter("probation_moved", "probation.moved", "Blocks that were moved to their drive"),
    _counter("probation_moved_bytes", "probation.moved_bytes", "What they held"),
    _counter("probation_dropped", "probation.dropped", "Blocks evicted from memory"),
    _counter("probation_refused", "probation.refused", "Blocks that memory had no room for"),
    _counter("gate_admitted", "gate.admitted", "New blocks that were worth a write"),
    _counter("gate_turned_away", "gate.turned_away", "New blocks that were not worth one"),
    _counter("hints_taken", "hints.taken", "Blocks that were hinted by the hints socket"),
    _counter("hints_clipped", "hints.clipped", "Values and numbers beyond a bound of hints"),
    _counter("hints_unknown", "hints.unknown", "Hints for names and sessions of no block"),
    _counter("hints_refused", "hints.refused", "Hints for blocks that the client may not write"),
    _counter("hints_fetched", "hints.fetched", "Blocks read into memory for a hint"),
    _counter("hint_kept_hits", "hints.kept_hits", "Uses of blocks that only a hint kept"),
    _counter("prefetch_blocks", "prefetch.read", "Blocks read ahead of their use"),
    _counter("prefetch_bytes", "prefetch.read_bytes", "What they hold"),
    _counter("prefetch_used", "prefetch.used", "Of these blocks opened then"),
    _counter("prefetch_wasted", "prefetch.wasted", "Of these blocks not opened in time"),
    _counter("prefetch_cached", "prefetch.cached", "Blocks that were in memory already"),
    _counter("eviction_batches", "eviction.batches", "Index transactions that evicted"),
    _counter("eviction_skipped", "eviction.skipped", "Candidates in use or no longer there"),
    _counter("eviction_overruns", "eviction.overruns", "Drafts stopped: they outgrew the pool"),
    _counter(
        "abandoned_drafts",
        "eviction.abandoned_drafts",
        "Drafts that their writers deleted while space was short",
    ),
    _counter("held_refused", "held_refused", "Requests of tenants that held their share"),
    _counter(
        "stores_refused",
        "largest_lease_holder.stores_refused",
        "Stores refused because of the limit of leases; absent while nothing is leased",
    ),
    _counter("space_waits", "space_waits.count", "Requests that waited for space"),
    _gauge("space_waiting_requests", "space_waits.waiting", "Requests that wait for space now"),
    _counter("space_waits_rejected", "space_waits.rejected", "Requests refused: too many waited"),
    _counter("space_waits_seconds", "space_waits.total_s", "Time spent waiting for space"),
    _gauge("space_waits_longest_seconds", "space_waits.longest_s", "Longest wait for space"),
    _counter("invalidations_sent", "invalidations.sent", "Invalidations sent to the kernel"),
    _counter("invalidations_skipped", "invalidations.skipped", "Invalidations not sent"),
    _gauge("invalidations_queued", "invalidations.queued", "Invalidations waiting to be sent"),
    _counter("requests", "requests.*", "FUSE requests received", "op"),
    _counter("requests_fast_path", "requests_fast_path.*", "Answered on the fast path", "op"),
    Family(
        "kvfs_errors",
        "counter",
        "errors.*",
        "Errors returned to callers",
        "errno",
        present=("EIO", "ENOSPC"),
    ),
    _counter("server_restarts", "restarts", "Servers that died and were followed by another"),
    _counter("server_upgrades", "upgrades", "Servers followed by one of another version"),
    _gauge("server_longest_pause_seconds", "longest_pause_s", "Longest pause of either kind"),
    _counter("server_cpu_seconds", "server_cpu_s", "CPU time that the server has used"),
    _counter("server_read_bytes", "server_read_bytes", "Bytes that READ requests asked it for"),
    _gauge("server_memory_bytes", "server_memory_bytes", "Memory of the server's own"),
    _gauge("background_jobs", "background_backlog", "Background jobs queued"),
    _gauge("backing_ids_open", "backing_ids_open", "Files registered with the kernel and open"),
    _gauge("backing_ids_cached", "backing_ids_cached", "Files registered and closed"),
)

_DURABILITY: Final = (
    _gauge("durable_within_seconds", "durability.within_s", "What a power loss may take; 0: more"),
    _gauge("undurable_blocks", "durability.blocks", "Published blocks that are not durable yet"),
    _gauge("undurable_bytes", "durability.bytes", "What they hold"),
    _gauge("undurable_oldest_seconds", "durability.oldest_s", "How long the oldest has waited"),
    _gauge("undurable_held_blocks", "durability.held_blocks", "Of them, those in use by a writer"),
    _counter("undurable_unlisted_blocks", "durability.unlisted", "Blocks beyond the list's end"),
    _counter("durable_blocks", "durability.marked", "Blocks that became durable"),
    _counter("durable_late_blocks", "durability.late", "Of them, those after the window"),
    _counter("device_flushes", "durability.flushes", "Flushes of the device"),
    _counter("durability_failures", "durability.failures", "Blocks and flushes that failed"),
    _gauge("undurable_attributes", "durability.attributes", "Changes of xattrs, pins, policies"),
    _counter("attributes_refused", "durability.attributes_refused", "Of those, without room"),
    _gauge("stray_files", "strays.files", "Files without a name, kept for a time"),
    _gauge("stray_bytes", "strays.bytes", "What they hold on the device"),
    _gauge("stray_oldest_seconds", "strays.oldest_s", "For how long the oldest is kept"),
    _counter("strays_gave_way", "strays.gave_way", "Those that went early, for their room"),
    _gauge("index_memory_bytes", "index_memory.bytes", "What the index takes of its tmpfs"),
    _gauge("index_memory_free_bytes", "index_memory.free_bytes", "What is free there"),
    _gauge("index_log_behind_seconds", "index_log.behind_s", "How old what the log lacks is"),
    _gauge("index_log_bytes", "index_log.bytes", "Log of the index since its last copy"),
    _counter("index_copies", "index_log.copies", "Copies of the index"),
    _counter("index_log_failures", "index_log.failures", "Batches and copies that failed"),
    _gauge(
        "reconciled_ratio",
        "reconcile.share",
        "How much of the index was compared with the files, after a start from its log",
    ),
    _counter("reconcile_entered", "reconcile.entered", "Inodes that only the files had"),
    _counter("reconcile_moved", "reconcile.moved", "Inodes that were newer in the files"),
    _counter("reconcile_dropped", "reconcile.dropped", "Inodes that no file confirmed"),
    _counter("checksums", "checksums.made", "Blocks that got a checksum"),
    _counter("checksums_missed", "checksums.unchecked", "Blocks that got none"),
    _counter("checksums_given", "checksums.given", "Blocks that got one by the scrub"),
    _counter("verified_right_blocks", "checksums.right", "Comparisons that found what was stored"),
    _counter(
        "verified_wrong_blocks", "checksums.wrong", "Blocks dropped: other bytes than were stored"
    ),
    _counter(
        "verified_unreadable_blocks",
        "checksums.unreadable",
        "Blocks dropped: the device could not read them",
    ),
    _counter("scrub_rounds", "checksums.rounds", "Times that the scrub has compared all"),
    _gauge(
        "quarantined_blocks",
        "checksums.quarantined_blocks",
        "Blocks with wrong bytes kept for a look",
    ),
    _gauge("quarantined_bytes", "checksums.quarantined_bytes", "What they hold on the device"),
)

_TROUBLE: Final = (
    _counter("torn_blocks", "torn_blocks", "Blocks deleted: their writer was killed"),
    _counter("unverified_blocks", "unverified_blocks", "Blocks deleted: perhaps not whole"),
    _counter("lost_blocks", "lost_blocks", "Blocks deleted: the device lost their bytes"),
    _counter("write_back_failures", "write_back_failures", "Failures to write data back"),
    _counter("damaged_rows", "damaged_rows", "Index rows that could not be read"),
    _counter("background_failures", "background_failures", "Background jobs that failed"),
    _counter("follow_failures", "follow_failures", "Changes that a table could not follow"),
)

FAMILIES: Final = (*CACHE_FAMILIES, *_SPACE, *_BLOCKS, *_LATENCY, *_WORK, *_DURABILITY, *_TROUBLE)

#: The one metric without a meaningful value: its labels are these keys of the status.
INFO_NAME: Final = "kvfs_mount"
INFO_MEANING: Final = "What is mounted, in labels; the value is 1"
INFO_LABELS: Final = ("version", "source", "name", "data_path")
#: 1 if the status has a true value under this key, else 0.
FLAGS: Final = {
    "kvfs_read_only": ("read_only", "Mounted read-only"),
    "kvfs_little_evictable": ("warning", "Almost nothing is evictable; kvfs status says what is"),
    "kvfs_device_lost": ("device_lost", "The device was given up"),
    "kvfs_device_silent": ("device_silent_s", "The device does not answer"),
}
