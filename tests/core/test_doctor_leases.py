"""What `kvfs doctor` says of leases: who keeps most, also when nobody can tell."""

from kvfs.doctor.examine import examine
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding

MIB = 1 << 20
STATUS = {
    "leased_bytes": 93 * MIB,
    "lease_max_bytes": 92 * MIB,
    "largest_lease_holder": {
        "pid": 4711,
        "program": "vllm",
        "bytes": 90 * MIB,
        "stores_refused": 7,
    },
}


def found(**status: object) -> list[Finding]:
    """Return the findings about a mount with *status* besides; only one rule may have any."""
    report = examine(Facts("/k v", status={**STATUS, **status}))
    return [finding for verdict in report.verdicts for finding in verdict.findings]


def test_who_keeps_most_is_named_with_the_setting_and_the_way_out() -> None:
    (finding,) = found()
    assert "93 MiB, lease_max allows 92 MiB: process 4711 (vllm) holds most" in finding.problem
    assert "(7 stores refused so far)" in finding.problem
    assert finding.fix.startswith("setfattr -n user.kvfs.lease -v none '/k v'\n")


def test_processes_that_nobody_can_watch_are_named_as_such() -> None:
    (finding,) = found(largest_lease_holder={"pid": 0, "program": "?", "bytes": 90 * MIB})
    assert "processes that cannot be watched (NFS, another pid namespace)" in finding.problem


def test_up_to_the_bound_nothing_is_said() -> None:
    assert found(leased_bytes=92 * MIB) == []
    assert found(largest_lease_holder=None) == []


def test_in_a_pool_where_nothing_may_go_the_process_is_named_too() -> None:
    full = {"capacity_bytes": 100 * MIB, "used_bytes": 99 * MIB, "evictable_bytes": 0}
    findings = found(**full, leased_bytes=91 * MIB)
    assert any("(most leases: process 4711 (vllm))" in finding.fix for finding in findings)


def test_one_that_is_at_the_limit_by_its_own_is_named() -> None:
    """Also after it removed a block: its next store is refused again."""
    lessee = {"pid": 4711, "program": "vllm", "bytes": 92 * MIB, "stores_refused": 7}
    (finding,) = found(leased_bytes=92 * MIB, largest_lease_holder=lessee)
    assert "process 4711 (vllm)" in finding.problem
    assert finding.problem.endswith("; by its own it is at the limit")


def test_limits_of_less_than_the_capacity_are_explained() -> None:
    room = {"capacity_bytes": 200 * MIB, "usable_bytes": 100 * MIB}
    (finding,) = found(**room)
    assert (
        "allows 92 MiB (the pool can hold 100 MiB of its capacity of 200 MiB; lease_max and "
        "pin_share are shares of that): process 4711" in finding.problem
    )
