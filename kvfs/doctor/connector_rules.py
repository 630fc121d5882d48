"""Rules about connectors: how much each may keep, and what it does if a block is gone."""

import re
import shlex
from typing import Final

from kvfs.core.sizes import GIB, format_size
from kvfs.doctor.facts import ConnectorLimit, Facts
from kvfs.doctor.finding import Finding, Severity

#: Of the capacity. kvfs needs the rest: ready extents (ready_share), headroom, partly used blocks.
_CONNECTOR_SHARE: Final = 0.9


def connector_limits(facts: Facts) -> list[Finding] | None:
    """A connector that may keep more than the pool holds does not evict in time by itself."""
    capacity_bytes = facts.status.get("capacity_bytes")
    if capacity_bytes is None:
        return None
    most_bytes = int(capacity_bytes * _CONNECTOR_SHARE)
    where = shlex.quote(facts.mountpoint)
    found = [
        Finding(
            Severity.SERIOUS if limit.keeps_index else Severity.WARNING,
            f"{limit.setting} of {limit.origin} is {format_size(limit.limit_bytes)}, more than "
            f"90 % of the pool's {format_size(capacity_bytes)}: kvfs evicts before the connector "
            + ("does, and the connector fails on missing blocks" if limit.keeps_index else "does"),
            _lower(limit, most_bytes, where),
        )
        for limit in facts.limits_of_connectors
        if limit.limit_bytes > most_bytes
    ]
    together_bytes = sum(limit.limit_bytes for limit in facts.limits_of_connectors)
    if not found and together_bytes > most_bytes:
        shares = ", ".join(
            f"{limit.setting} of {limit.origin} {format_size(limit.limit_bytes)}"
            for limit in facts.limits_of_connectors
        )
        largest = max(facts.limits_of_connectors, key=lambda limit: limit.limit_bytes)
        found.append(
            Finding(
                Severity.WARNING,
                f"the connectors may keep {format_size(together_bytes)} together, more than 90 % "
                f"of the pool's {format_size(capacity_bytes)}: {shares}",
                _lower(largest, _fair(largest, together_bytes, most_bytes), where),
            )
        )
    return found


def _fair(largest: ConnectorLimit, together_bytes: int, most_bytes: int) -> int:
    """Return a limit for *largest*: what the others leave, or its share if that is too little."""
    left_bytes = most_bytes - together_bytes + largest.limit_bytes
    share_bytes = most_bytes * largest.limit_bytes // together_bytes
    return left_bytes if left_bytes >= largest.unit_bytes else share_bytes


def _lower(limit: ConnectorLimit, most_bytes: int, where: str) -> str:
    value: float = most_bytes // limit.unit_bytes
    if value == 0 and limit.unit_bytes == GIB:  # LMCache takes fractions
        value = most_bytes * 100 // GIB / 100
    if value == 0:  # which means "no limit" to most of them
        return (
            f"kvfs status {where}\nthe pool is too small: no value of {limit.setting} fits into "
            f"{format_size(most_bytes)}; use a larger drive, with a capacity of "
            f"{format_size(int(limit.limit_bytes / _CONNECTOR_SHARE))}"
        )
    if limit.file:  # the number may be in quotation marks, or have a unit
        line = rf"s/({re.escape(limit.setting)}[\"']?\s*[:=]\s*[\"']?)[0-9.]+[A-Za-z]*/\1{value}/"
        return f"sed -Ei {shlex.quote(line)} {shlex.quote(limit.file)}\nthen restart the connector"
    if limit.setting.isupper():
        return f"export {limit.setting}={value}\nthen restart the connector"
    unit = "" if limit.unit_bytes == 1 else f" (in {format_size(limit.unit_bytes)})"
    process = re.match(r"process (\d+) ", limit.origin)
    show = f"ps --format args= --pid {process[1]}" if process else f"kvfs status {where}"
    return f"{show}\nrestart the connector with {limit.setting} {value}{unit}"


def load_failures(facts: Facts) -> list[Finding] | None:
    """A block that is gone is a miss. vLLM fails its request unless it is told to recompute."""
    if facts.habits_of_connectors is None:
        return None
    return [
        Finding(
            Severity.SERIOUS,
            f"{habit.origin} fails each request with a block that is gone when it is loaded: its "
            "--kv-transfer-config does not set kv_load_failure_policy to recompute",
            f"{habit.command}\nstart it this way, with the same environment",
        )
        for habit in facts.habits_of_connectors
        if habit.habit == "fails requests"
    ]


def databases(facts: Facts) -> list[Finding] | None:
    """A database that loses one of its files does not open again (RocksDB)."""
    if facts.habits_of_connectors is None:
        return None
    return [
        Finding(
            Severity.SERIOUS,
            f"{habit.origin} keeps a RocksDB (AIBrix) in {habit.command}: when kvfs evicts one of "
            "its files, or its process is killed, it does not open again",
            f"mkdir -p {shlex.quote(habit.command)}\n"
            f"setfattr -n user.kvfs.evict -v together {shlex.quote(habit.command)}",
        )
        for habit in facts.habits_of_connectors
        if habit.habit == "keeps a database"
    ]


def file_per_key(facts: Facts) -> list[Finding] | None:
    """Mooncake's backend file_per_key has no limit, so none can be set below the capacity."""
    if facts.habits_of_connectors is None:
        return None
    wanted_bytes = int(facts.status.get("capacity_bytes", 0) * _CONNECTOR_SHARE)
    return [
        Finding(
            Severity.WARNING,
            f"{habit.origin} keeps a file per key (Mooncake): its only limit is 90 % of the pool's "
            "size, its stores fail when that is reached, and its loads of evicted blocks fail",
            "export MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR=bucket_storage_backend "
            f"MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE={wanted_bytes}\nthen restart the client",
        )
        for habit in facts.habits_of_connectors
        if habit.habit == "keeps a file per key"
    ]
