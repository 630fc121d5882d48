"""Metrics of a live mount: those of docs/metrics.md, with the values of `kvfs status`, for all."""

import contextlib
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from kvfs.core.errors import UsageError
from kvfs.core.mount_name import metrics_path
from mount.control.metrics.families import FAMILIES, FLAGS
from mount.fuse.channel import TIMED_OF
from tests.fuse.conftest import NOBODY
from tests.support.clients.stepping import until
from tests.support.machines.prometheus import free_port
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts, workplace
from tests.support.rules.metric_document import documented, promtool, scraped

pytestmark = pytest.mark.needs_fuse

#: Of one data path only; of a device that is lost.
OF_PASSTHROUGH = {"kvfs_backing_ids_open", "kvfs_backing_ids_cached"}
#: Absent until the first eviction, miss after one, or checkpoint; or for good.
NOT_FROM_THE_START = {
    "kvfs_age_at_eviction_seconds",
    "kvfs_missed_after_eviction_seconds",
    "kvfs_predicted_hit_ratio",
    "kvfs_checkpoint_age_seconds",
    "kvfs_tenant_quota_bytes",
    # Of a drive: the pools of tests lie in memory or behind a loop device.
    "kvfs_device_written_bytes_total",
    "kvfs_device_endurance_left_ratio",
    "kvfs_device_endurance_left_bytes",
    "kvfs_drive_endurance_left_ratio",
    "kvfs_drive_endurance_left_bytes",
    # Of a budget of writes, which this mount has not.
    "kvfs_gate_used_hour_ratio",
    "kvfs_gate_used_day_ratio",
    "kvfs_gate_lasts_days",
    "kvfs_drive_written_bytes_total",
}
ACCEPT_OPEN = "Accept: application/openmetrics-text; version=1.0.0,text/plain;q=0.5"


@pytest.fixture
def busy(mount: Mounted, kv: Path, kvfs_only: None) -> str:
    """The socket of a mount on which every metric has a value; its values rest."""
    (kv / "block").write_bytes(b"x" * 4096)
    (kv / "model@1@0@hash.data").write_bytes(b"of a model")
    assert (kv / "block").read_bytes()
    for number in range(2 * TIMED_OF):
        assert not (kv / f"missing-{number}").exists()
    with contextlib.suppress(PermissionError):
        os.mknod(kv / "device", stat.S_IFCHR | 0o600)
    return metrics_path(str(mount.status()["name"]))


def by_name(families: Iterator[Metric]) -> dict[str, Metric]:
    return {one.name: one for one in families}


def created(path: str) -> float:
    """Return how many CREATEs a scrape tells of."""
    samples = by_name(plain_families(scraped(path)))["kvfs_requests"].samples
    return sum(one.value for one in samples if one.labels["op"] == "CREATE")


def full_name(metric: Metric) -> str:
    """Return the name of *metric* as the page has it."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def test_the_page_has_the_metrics_of_a_mount(busy: str, mount: Mounted) -> None:
    page = documented()
    found = {full_name(one): one for one in open_families(scraped(busy, ACCEPT_OPEN))}
    other_path = set() if mount.status()["data_path"] == "passthrough" else OF_PASSTHROUGH
    assert page.keys() - found.keys() <= other_path | NOT_FROM_THE_START
    assert found.keys() <= page.keys()
    for name, metric in found.items():
        told = page[name]
        assert (metric.type, metric.documentation) == (told.kind, told.meaning), name
        assert (metric.unit or told.unit) == told.unit, name
        assert metric.samples, name
        for sample in metric.samples:
            assert sample.labels.keys() - {"le"} == told.labels, name
            assert sample.labels["mount"] == str(mount.path)


@pytest.mark.parametrize("name", documented())
def test_a_unit_is_the_end_of_the_name(name: str) -> None:
    told = documented()[name]
    end = name.removesuffix("_total").rpartition("_")[2]
    assert (told.unit in ("bytes", "seconds", "ratio")) == (told.unit == end)
    assert (told.kind == "counter") == name.endswith("_total")


def test_values_are_those_of_the_status(busy: str, mount: Mounted) -> None:
    until(lambda: created(busy) == mount.requests()["CREATE"], "the text is made anew")
    found = by_name(plain_families(scraped(busy)))
    status = mount.status()
    samples = {one.name: one for one in found["kvfs_capacity_bytes"].samples}
    assert samples["kvfs_capacity_bytes"].value == status["capacity_bytes"]
    states = {one.labels["state"]: one.value for one in found["kvfs_state_blocks"].samples}
    assert states.keys() == status["states"].keys()
    # Extents for the next files are prepared and given up meanwhile.
    for state in states.keys() - {"preallocated"}:
        assert states[state] == status["states"][state]["blocks"], state
    errors = {one.labels["errno"]: one.value for one in found["kvfs_errors"].samples}
    assert errors == {"EIO": 0, "ENOSPC": 0} | status["errors"]


def test_promtool_finds_nothing(busy: str) -> None:
    assert promtool("check", "metrics", given=scraped(busy)) == ""


def test_any_user_of_the_host_may_scrape(busy: str) -> None:
    command = ["curl", "--silent", "--fail", "--unix-socket", busy, "http://localhost/metrics"]
    done = subprocess.run(
        command, user=NOBODY, group=NOBODY, capture_output=True, text=True, check=True
    )
    assert "kvfs_capacity_bytes{" in done.stdout


def test_every_metric_of_the_table_is_scraped_from_somewhere() -> None:
    names = {f"{one.name}_total" if one.kind == "counter" else one.name for one in FAMILIES}
    assert names | FLAGS.keys() | {"kvfs_mount_info"} == documented().keys()


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    skip_without_mounts()
    for flag in (
        "metrics_port=0x",
        "metrics_textfile=kvfs.prom",
        f"metrics_textfile={tmp_path}/kvfs.prom",
        "metrics_socket_mode=0777",
        "events_socket_mode=0007",
    ):
        done = run_kvfs("mount", "/dev/shm/no-pool", str(tmp_path), f"--set={flag}", check=False)
        assert done.returncode == UsageError.exit_code
        assert flag.partition("=")[0] in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_settings_open_a_port_and_write_a_file(tmp_path: Path) -> None:
    """The socket is for its own user then; all of it is gone with the mount."""
    skip_without_mounts()
    textfile, port = tmp_path / "kvfs.prom", free_port()
    with workplace() as place:
        (place / "pool").mkdir()
        sets = {
            "metrics_port": port,
            "metrics_textfile": str(textfile),
            "metrics_textfile_s": "1",
            "metrics_socket_mode": "0600",
        }
        with Mounted(
            place / "pool", place / "kv", *(f"--set={key}={value}" for key, value in sets.items())
        ) as mount:
            path = metrics_path(str(mount.status()["name"]))
            assert os.stat(path).st_mode & 0o777 == 0o600
            command = ["curl", "--silent", "--fail", f"http://127.0.0.1:{port}/metrics"]
            over_port = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            until(textfile.exists, "the file is written")
            names = set(re.findall(r"^# TYPE (\w+)", over_port, re.MULTILINE))
            assert names == set(re.findall(r"^# TYPE (\w+)", textfile.read_text(), re.MULTILINE))
            assert textfile.stat().st_mode & 0o777 == 0o644
        assert os.listdir(tmp_path) == []
        assert not os.path.exists(path)
        assert mount.errors() == []
