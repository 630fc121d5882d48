"""Each rule of `kvfs doctor`: silent about a healthy mount, right about an ill one."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfs.client.nfs.nfsd import Export
from kvfs.doctor.examine import RULES, examine
from kvfs.doctor.facts import Facts, NfsMount, ReadAheadSetting
from kvfs.doctor.finding import Finding, Severity
from tests.support.doctor.ill_exports import nfs
from tests.support.doctor.ill_mounts import (
    GIB,
    HEALTHY,
    ILL,
    IN_A_FILE,
    LOCAL_DISK,
    connectors,
)
from tests.support.rules.documented import of


def findings_of(facts: Facts) -> list[tuple[str, Finding]]:
    return [(one.check, finding) for one in examine(facts).verdicts for finding in one.findings]


def test_a_healthy_mount_has_no_findings() -> None:
    report = examine(HEALTHY)
    assert findings_of(HEALTHY) == []
    assert report.worst is None
    assert all(verdict.is_decided for verdict in report.verdicts)


def test_a_healthy_mount_through_nfs_has_no_findings() -> None:
    facts = Facts(mountpoint="/kv", dirty=HEALTHY.dirty, **nfs())
    assert findings_of(facts) == []


def test_the_mount_that_the_page_on_nfs_shows_has_no_findings() -> None:
    """docs/nfs.md; no kernel here has an NFS client to mount it with."""
    (command,) = of("docs/nfs.md", "mount -t nfs ")
    options = command.split()[4].split(",")
    given = {name: value for name, _, value in (one.partition("=") for one in options)}
    facts = Facts(mountpoint="/kv", nfs=NfsMount("server:/kv", "nfs4", given))
    assert {"softerr", "nconnect", "acdirmin", "vers"} <= given.keys()
    assert findings_of(facts) == []


@pytest.mark.parametrize(("check", "ill", "severity", "problem", "fix"), ILL)
def test_what_is_ill_is_found_and_nothing_else(
    check: str, ill: dict[str, Any], severity: Severity, problem: str, fix: str
) -> None:
    found = findings_of(replace(HEALTHY, **ill))
    (finding,) = [one for found_by, one in found if found_by == check]
    # The daemon path is a finding by itself, also where it is about the mount's read-ahead.
    others = {found_by for found_by, _ in found} - {check}
    assert others == (
        {"passthrough"} if ill.get("status", {}).get("data_path") == "daemon" else set()
    ) - {check}
    assert finding.severity is severity
    assert problem in finding.problem
    assert fix in finding.fix


def test_every_rule_is_tested() -> None:
    assert {check for check, *_ in ILL} == set(RULES)


def test_what_is_not_known_is_not_decided() -> None:
    report = examine(Facts(mountpoint="/kv"))
    assert report.worst is None
    undecided = [verdict.check for verdict in report.verdicts if not verdict.is_decided]
    assert "passthrough" in undecided
    assert "open files" in undecided
    assert "read-ahead" in undecided


@pytest.mark.parametrize("timeout_s", [None, 104])
def test_no_limit_for_requests_or_a_long_one_is_fine(timeout_s: int | None) -> None:
    assert findings_of(replace(HEALTHY, request_timeout_max_s=timeout_s)) == []


def test_the_mounts_own_read_ahead_does_not_count_with_passthrough() -> None:
    none = ReadAheadSetting(0, "/sys/class/bdi/0:50/read_ahead_kb")
    assert findings_of(replace(HEALTHY, fuse_read_ahead=none)) == []


@pytest.mark.parametrize(
    ("said", "lowered"),
    [
        ('{"max_local_disk_size": "1200"}', '{"max_local_disk_size": "900"}'),
        ("max_local_disk_size: 1200.5   # GiB", "max_local_disk_size: 900   # GiB"),
        ("max_local_disk_size='1200Gi'", "max_local_disk_size='900'"),
    ],
)
def test_the_command_lowers_what_the_file_says(tmp_path: Path, said: str, lowered: str) -> None:
    file = tmp_path / "settings"
    file.write_text(said)
    limit = IN_A_FILE._replace(file=str(file))
    ((_, finding),) = findings_of(replace(HEALTHY, **connectors(limit)))
    subprocess.run(finding.fix.splitlines()[0], shell=True, check=True)
    assert file.read_text() == lowered


def test_no_connector_is_told_to_keep_nothing_at_all() -> None:
    each = [LOCAL_DISK._replace(limit_bytes=600 * GIB, origin=f"process {n}") for n in range(3)]
    ((_, finding),) = findings_of(replace(HEALTHY, **connectors(*each)))
    assert "_SIZE=300\n" in finding.fix
    small = replace(HEALTHY, status={**HEALTHY.status, "capacity_bytes": GIB})
    slots = LOCAL_DISK._replace(setting="pool_size", unit_bytes=2 * GIB)
    for limit, said in (LOCAL_DISK, "_SIZE=0.89\n"), (slots, "no value of pool_size fits"):
        fixes = [finding.fix for _, finding in findings_of(replace(small, **connectors(limit)))]
        assert any(said in fix for fix in fixes)


def test_the_lowered_setting_of_a_file_is_what_sed_finds() -> None:
    ((_, finding),) = findings_of(replace(HEALTHY, **connectors(IN_A_FILE)))
    assert r"\1900/" in finding.fix
    assert finding.fix.splitlines()[0].endswith("l.yaml")


def test_each_pool_and_directory_has_an_fsid_of_its_own() -> None:
    """The same each time, and none is another's."""

    def fsids(uuid: object, source: str) -> list[str]:
        exports = tuple(Export(path, "*", frozenset()) for path in ("/kv", "/kv/a", "/kv/b\udcff"))
        facts = replace(
            HEALTHY, status={**HEALTHY.status, "uuid": uuid}, exports=exports, source=source
        )
        return [
            finding.fix.partition("fsid=")[2].partition(" ")[0] for _, finding in findings_of(facts)
        ]

    pool = HEALTHY.status["uuid"]
    first, other = (
        fsids(pool, "/data/pool"),
        fsids("99999999-0c2d-4b2c-9a5e-6f0e3c1ff20c", "/data/pool"),
    )
    assert first[0] == pool
    assert first == fsids(pool, "/data/pool")
    older, elsewhere = fsids(None, "/data/pool"), fsids("", "/data/other")
    assert len({*first, *other, *older, *elsewhere}) == 12
