"""Rules about leases: who keeps most of the pool by them, and how he lets it go."""

import shlex
from typing import Any

from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding, Severity


def leases(facts: Facts) -> list[Finding] | None:
    """Who has more leases than its share is refused what it stores under final names."""
    leased_bytes, most_bytes = facts.status.get("leased_bytes"), facts.status.get("lease_max_bytes")
    if leased_bytes is None or most_bytes is None:
        return None
    lessee: dict[str, Any] | None = facts.status.get("largest_lease_holder")
    if lessee is None or leased_bytes <= most_bytes:
        return []
    refused = lessee.get("stores_refused", 0)
    return [
        Finding(
            Severity.WARNING,
            f"leases keep {format_size(leased_bytes)}, lease_max allows {format_size(most_bytes)}: "
            f"{lessee_of(facts)} keeps most, and who is over its share is refused what it stores "
            f"under final names ({refused} so far)",
            f"setfattr -n user.kvfs.lease -v none {shlex.quote(facts.mountpoint)}\n"
            "if the programs there can do without a block that they stored; else end the process, "
            "or set its own limit lower",
        )
    ]


def lessee_of(facts: Facts) -> str | None:
    """Return who keeps most by leases, for a reader; None if nobody is known."""
    lessee = facts.status.get("largest_lease_holder")
    if not isinstance(lessee, dict):
        return None
    if not lessee.get("pid"):
        return "processes that cannot be watched (NFS, another pid namespace)"
    return f"process {lessee['pid']} ({lessee.get('program', '?')})"
