"""All rules of `kvfs doctor`, by the names that its report shows."""

from typing import Final

from kvfs.doctor import (
    connector_rules,
    drive_rules,
    machine_rules,
    nfs_rules,
    pool_rules,
    server_rules,
)
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Report, Rule, Verdict

RULES: Final[dict[str, Rule]] = {
    "connector limits": connector_rules.connector_limits,
    "load failures": connector_rules.load_failures,
    "file per key": connector_rules.file_per_key,
    "databases": connector_rules.databases,
    "evictable data": pool_rules.evictable_data,
    "leases": pool_rules.leases,
    "backing space": pool_rules.backing_space,
    "index map": pool_rules.index_map,
    "index memory": pool_rules.index_memory,
    "units": pool_rules.units,
    "durability": pool_rules.durability,
    "damage": pool_rules.damage,
    "hit rate": server_rules.hit_rate,
    "lives of blocks": server_rules.lives,
    "store times": server_rules.store_times,
    "passthrough": pool_rules.passthrough,
    "small reads": pool_rules.small_reads,
    "supervisor": server_rules.supervisor,
    "request timeout": server_rules.request_timeout,
    "open files": server_rules.open_files,
    "memory bound": server_rules.memory_bound,
    "CPU bound": server_rules.cpu_bound,
    "OOM killer": server_rules.oom_killer,
    "NUMA": machine_rules.numa,
    "CPU wake-ups": machine_rules.wake_ups,
    "GPUs": drive_rules.gpu_nodes,
    "one device": drive_rules.shared_device,
    "unlike drives": drive_rules.unlike_drives,
    "RAID": drive_rules.raid,
    "I/O scheduler": machine_rules.io_scheduler,
    "rotating drive": machine_rules.rotating_drive,
    "read-ahead": machine_rules.read_ahead,
    "dirty limits": machine_rules.dirty_limits,
    "page cache": machine_rules.page_cache,
    "mount options": machine_rules.mount_options,
    "XFS": machine_rules.xfs,
    "below the mount": machine_rules.below_mount,
    "NFS exports": nfs_rules.exports,
    "NFS-Ganesha": nfs_rules.ganesha,
    "NFS mount": nfs_rules.mount,
}


def examine(facts: Facts) -> Report:
    """Return what every rule says about *facts*."""
    verdicts = []
    for check, rule in RULES.items():
        findings = rule(facts)
        verdicts.append(Verdict(check, tuple(findings or ()), findings is not None))
    return Report(facts.mountpoint, tuple(verdicts))
