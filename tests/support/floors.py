"""Which floor each module stands on: imports point down only. The one table of the architecture.

A new module gets its line here; ``package.*`` stands for all modules of a package.
"""

from typing import Final

#: Bottom first. A module imports from its own floor and from those below, never from above.
FLOORS: Final = ("pure", "io", "engine", "mount", "cli")

_MODULES: Final = {
    # Values and rules; no machine, no clock.
    "pure": """
        kvfs kvfs.census kvfs.checksum kvfs.config kvfs.demand kvfs.doctor.* kvfs.errors
        kvfs.eviction kvfs.fought_over kvfs.ghosts kvfs.headroom kvfs.heat_marks kvfs.index_room
        kvfs.former_names
        kvfs.inode_rules
        kvfs.kv_content kvfs.kv_shapes kvfs.lifecycle kvfs.node_bound
        kvfs.policy kvfs.pool_name kvfs.printable
        kvfs.records kvfs.refusal kvfs.row_table kvfs.setting_values kvfs.sizes
        kvfs.settings_text
        kvfs.stay_bounds kvfs.types
    """,
    # One thing of the machine each: a file, a device, the index, a socket.
    "io": """
        kvfs.again kvfs.aside kvfs.available_memory kvfs.background kvfs.below_mount kvfs.bench.*
        kvfs.control_client kvfs.control_files kvfs.devices.* kvfs.extents kvfs.fan_out kvfs.fiemap
        kvfs.heat
        kvfs.heat_file kvfs.holdings kvfs.holes kvfs.index kvfs.index_environment
        kvfs.index_errors kvfs.index_file
        kvfs.credentials kvfs.index_map kvfs.kernel_log
        kvfs.endings kvfs.spare_files
        kvfs.index_place kvfs.index_range kvfs.index_transaction kvfs.inode_numbers kvfs.kv_files
        kvfs.kv_load kvfs.lease_shares kvfs.makers kvfs.measure kvfs.mount_table
        kvfs.mounted_elsewhere kvfs.open_inodes kvfs.pending_rows kvfs.pins kvfs.policies
        kvfs.record_cache kvfs.rested_code kvfs.run_state kvfs.stopping kvfs.syscalls kvfs.wake_up
    """,
    # The pool as a whole: names, blocks, space.
    "engine": """
        kvfs.allocations kvfs.attributes kvfs.blocks kvfs.check kvfs.check_files kvfs.check_rows
        kvfs.damage kvfs.departures kvfs.device_room kvfs.displaced kvfs.dropping kvfs.evict_by_hand
        kvfs.evictable
        kvfs.fitness kvfs.device_watch kvfs.doubts
        kvfs.founding kvfs.fsck_report kvfs.graves kvfs.heat_scan kvfs.holdings_scan
        kvfs.index_compaction
        kvfs.identities kvfs.index_walk kvfs.moved kvfs.name_eviction kvfs.name_room kvfs.namespace
        kvfs.old_versions
        kvfs.last_closes
        kvfs.own_attributes
        kvfs.pool kvfs.pool_change kvfs.publishing kvfs.ready kvfs.rebuild kvfs.reclaim
        kvfs.reclaim_figures kvfs.recovery kvfs.space kvfs.state_totals kvfs.store
        kvfs.superseding kvfs.sweep kvfs.unfinished kvfs.unreadable kvfs.victims kvfs.visibility
        kvfs.watch kvfs.write_back
    """,
    # The only floor that knows FUSE.
    "mount": "mount.*",
    "cli": "kvfs.cli.*",
}
_FLOOR_OF: Final = {
    module: floor for floor, modules in _MODULES.items() for module in modules.split()
}


def floor_of(module: str) -> str | None:
    """Return the floor of *module*, or None when the table does not know it."""
    if module in _FLOOR_OF:
        return _FLOOR_OF[module]
    package = module
    while package:
        if (floor := _FLOOR_OF.get(f"{package}.*")) is not None:
            return floor
        package = package.rpartition(".")[0]
    return None
