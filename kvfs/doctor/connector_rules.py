"""Rules about what connectors do with blocks that are gone, and with a pool that is full."""

from typing import Final

from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding, Severity

#: What is left to kvfs, as for the limits (pool_rules.py).
_CONNECTOR_SHARE: Final = 0.9


def load_failures(facts: Facts) -> list[Finding] | None:
    """A block that is gone is a miss; vLLM fails the request for it unless told to recompute."""
    if facts.habits_of_connectors is None:
        return None
    return [
        Finding(
            Severity.SERIOUS,
            f"{habit.origin} fails each request of which a block is gone when it is loaded: its "
            "--kv-transfer-config has no kv_load_failure_policy of recompute",
            f"{habit.command}\nin its place, with its environment",
        )
        for habit in facts.habits_of_connectors
        if habit.habit == "fails requests"
    ]


def file_per_key(facts: Facts) -> list[Finding] | None:
    """Mooncake's backend file_per_key has no limit that could be set below the pool's capacity."""
    if facts.habits_of_connectors is None:
        return None
    wanted_bytes = int(facts.status.get("capacity_bytes", 0) * _CONNECTOR_SHARE)
    return [
        Finding(
            Severity.WARNING,
            f"{habit.origin} keeps a file per key (Mooncake): it has no limit but 90 % of what the "
            "pool shows, its stores fail when that is full, and loads of what kvfs evicted fail",
            "export MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR=bucket_storage_backend "
            f"MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE={wanted_bytes}\nthen restart the client",
        )
        for habit in facts.habits_of_connectors
        if habit.habit == "keeps a file per key"
    ]
