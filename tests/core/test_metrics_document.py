"""Every figure of docs/status.md is a metric of docs/metrics.md, or stands here with a reason."""

import re
from typing import Any, Final

import pytest

from kvfs.core.settings import Settings
from mount.control.metrics.exposition import families_of, values_of
from mount.control.metrics.families import FAMILIES, FLAGS, INFO_LABELS
from mount.control.metrics.family import ANY
from mount.control.status import describe_lost
from tests.support.rules.metric_document import documented
from tests.support.rules.source_tree import ROOT

ROW: Final = re.compile(r"^\| `([\w.]+)` \| ([^|]+) \|", re.MULTILINE)
#: What a key begins with: why it is no metric.
NOT_EXPORTED: Final = {
    **dict.fromkeys(("mountpoint", *INFO_LABELS), "a label"),
    **dict.fromkeys(
        ("uuid", "root.", "device_number", "server_pid", "supervisor_pid"), "an identity"
    ),
    **dict.fromkeys(
        (
            "data_path_reason",
            "device_state",
            "drives.DRIVE.state",
            "encryption",
            "eviction.policy",
            "index_in",
            "request_reader",
            "takeover",
        ),
        "a text",
    ),
    **dict.fromkeys(("drives.DRIVE.source", "drives.DRIVE.uuid"), "an identity"),
    "index_log.drives": "which they are; the log says why they change",
    **dict.fromkeys(("largest_lease_holder.p", "largest_unevictable.directory"), "whose it is"),
    **dict.fromkeys(("cache.hits", "cache.misses", "cache.loaded_", "cache.stored_"), "a sum"),
    **dict.fromkeys(("eviction.blocks", "eviction.bytes"), "a sum, over the reasons"),
    **dict.fromkeys(("cache.hit_rate", "cache.directories.NAME.hit_rate"), "a ratio of metrics"),
    "cache.models.MODEL.hit_rate": "the same",
    "cache.tier_behind.ages.AGE.hit_rate_gain": "the same",
    "cache.tier_behind.daily_bytes": "the rate of a metric, what was evicted",
    "cache.tier_behind.names_share": "how the estimate was made",
    "index_memory.full": "what is free there tells it",
    **dict.fromkeys(("cache.device.write_rate", "drives.DRIVE.write_rate"), "the rate of a metric"),
    **dict.fromkeys(("checksums.verify", "idmapped_mounts", "request_wait_max_s"), "a setting"),
    "checksums.doubtful": "a state that verify and its counters end",
    "cache.curve_": "how the prediction was made",
    "together.files": "their bytes say more",
    "together.too_large": "kvfs doctor says it",
    **{key: "the key of a flag" for key, _ in FLAGS.values()},
}


def keys() -> list[str]:
    """Every key of the page."""
    found = [key for key, _ in ROW.findall((ROOT / "docs" / "status.md").read_text())]
    assert len(found) > 50
    return found


def is_exported(key: str) -> bool:
    """Whether a metric has *key*, or all below a part of it."""
    parts = key.split(".")
    for family in FAMILIES:
        wanted = family.key.split(".")
        if all(
            one in (ANY, other) or other.isupper()
            for one, other in zip(wanted, parts, strict=False)
        ) and (len(wanted) <= len(parts) or key == "cache.curve"):
            return True
    return False


@pytest.mark.parametrize("key", keys())
def test_a_figure_is_a_metric_or_says_why_not(key: str) -> None:
    """In mount/control/metrics/families.py and docs/metrics.md, or in NOT_EXPORTED."""
    reasons = [start for start in NOT_EXPORTED if key.startswith(start)]
    assert is_exported(key) != bool(reasons), reasons


@pytest.mark.parametrize("start", NOT_EXPORTED)
def test_no_reason_is_left_over(start: str) -> None:
    assert any(key.startswith(start) for key in keys())


def test_every_metric_has_the_row_that_the_table_says() -> None:
    """Also those that a mount has only now and then."""
    page = documented()
    for family in FAMILIES:
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        told = page[name]
        assert (told.kind, told.meaning) == (family.kind, family.meaning)
        assert told.unit == (family.unit or "count")
        assert told.labels == {"mount", family.label} - {""}


STATUS: Final[dict[str, Any]] = {
    "a": {"x": {"n": 1}, "y": {"n": 2}, "z": {"n": None}},
    "age": {"p10_s": 1.5, "p50_s": None},
    "curve": [{"factor": 0.5, "n": 3}, {"factor": 2.0, "n": 4}],
}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("a.*.n", [("x", 1), ("y", 2)]),
        ("a.x.n", [("", 1)]),
        ("age.*", [("p10", 1.5)]),
        ("curve.*.n", [("0.5", 3), ("2.0", 4)]),
        ("b.*.n", []),
        ("a.x.n.deeper", []),
    ],
)
def test_a_value_is_found_with_its_label(key: str, values: list[tuple[str, float]]) -> None:
    assert list(values_of(STATUS, key.split("."))) == values


def test_a_path_that_is_not_utf8_is_a_label_all_the_same() -> None:
    """As os.fsdecode has it."""
    status = describe_lost(Settings(mountpoint="/kv\udcff", source="/dev/x"), "EIO")
    samples = [sample for family in families_of(status) for sample in family.samples]
    assert {sample.labels["mount"] for sample in samples} == {"/kv\N{REPLACEMENT CHARACTER}"}
