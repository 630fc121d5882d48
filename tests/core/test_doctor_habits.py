"""What `kvfs doctor` reads of connectors' habits: what they do with blocks that are gone."""

import json
import shlex
from dataclasses import replace
from typing import Any, Final

import pytest

from kvfs.doctor.connector_rules import databases, file_per_key, load_failures
from kvfs.doctor.connector_settings import (
    fails_requests,
    from_command_line,
    from_environment,
    keeps_a_database,
    keeps_file_per_key,
    serves_below,
)
from kvfs.doctor.facts import ConnectorHabit, Facts
from kvfs.doctor.finding import Severity

TIERED: Final[dict[str, Any]] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"secondary_tiers": [{"type": "fs", "root_dir": "/kv/vllm"}]},
}
IN_PROCESS: Final = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
REMOTE: Final = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
MOONCAKE: Final = {
    "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/kv/mooncake",
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
}


def vllm(config: object) -> list[str]:
    return ["vllm", "serve", "MODEL", "--kv-transfer-config", json.dumps(config), "--port", "1"]


def habits(words: list[str], told: str = "") -> list[ConnectorHabit]:
    return list(fails_requests(words, told, "/kv", "process 5 (vllm)"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (vllm(TIERED), ""),
        (vllm({**TIERED, "kv_load_failure_policy": "fail"}), ""),
        (["vllm", f"--kv_transfer_config={json.dumps(TIERED)}"], ""),
        (vllm({"kv_connector": "MultiConnector", "kv_connector_extra_config": [TIERED]}), ""),
        (vllm(IN_PROCESS), "file:///kv/lmcache"),
        (vllm(IN_PROCESS), "extra_config:\n  remote_storage_plugin.fs.base_path: /kv/lmcache\n"),
        (
            [
                "vllm",
                "--kv-transfer-config.kv_connector=OffloadingConnector",
                "--kv-transfer-config.root_dir",
                "/kv",
            ],
            "",
        ),
    ],
)
def test_vllm_that_fails_requests(words: list[str], told: str) -> None:
    (habit,) = habits(words, told)
    assert (habit.habit, habit.is_remote) == ("fails requests", False)
    # The command does it, and nothing else is other than it was.
    again = shlex.split(habit.command)
    assert habits(again, told) == []
    assert [word for word in words if "kv" not in word] == [one for one in again if "kv" not in one]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (vllm({**TIERED, "kv_load_failure_policy": "recompute"}), ""),
        ([*vllm(TIERED), "--kv-transfer-config.kv_load_failure_policy", "recompute"], ""),
        (vllm({**TIERED, "kv_connector_extra_config": {"root_dir": "/kvx/vllm"}}), ""),
        (vllm(IN_PROCESS), "/elsewhere"),
        (vllm([]), ""),
        (["vllm", "--kv-transfer-config", "{"], "/kv"),
        (["vllm", "--kv-transfer-config"], "/kv"),
        (["cat", "/kv/a"], "/kv"),
    ],
)
def test_vllm_that_does_not(words: list[str], told: str) -> None:
    assert habits(words, told) == []


def test_lmcaches_server_has_the_files_of_its_connector() -> None:
    (habit,) = habits(vllm(REMOTE))
    assert habit.is_remote
    adapter = json.dumps({"type": "fs_native", "base_path": "/kv/lmcache"})
    words = ["lmcache", "server", "--l2-adapter", adapter]
    assert serves_below(words, "/kv")
    assert not serves_below(words, "/kvx")
    assert not serves_below(["cat", "/kv/lmcache"], "/kv")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (MOONCAKE, True),
        ({**MOONCAKE, "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/elsewhere"}, False),
        ({"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/kv/mooncake"}, False),
        ({}, False),
    ],
)
def test_mooncake_that_keeps_a_file_per_key(environment: dict[str, str], found: bool) -> None:
    assert bool(list(keeps_file_per_key(environment, "/kv", "process 5 (x)"))) is found


def test_what_the_rules_make_of_them() -> None:
    facts = Facts(mountpoint="/kv", status={"capacity_bytes": 1000})
    assert load_failures(facts) is file_per_key(facts) is None
    assert load_failures(replace(facts, habits_of_connectors=())) == []
    both = (
        ConnectorHabit("fails requests", "process 5 (vllm)", "vllm serve"),
        ConnectorHabit("keeps a file per key", "process 6 (python)"),
    )
    told = replace(facts, habits_of_connectors=both)
    (failing,), (keeping,) = load_failures(told) or [], file_per_key(told) or []
    assert failing.severity is Severity.SERIOUS
    assert failing.fix.startswith("vllm serve\n")
    assert keeping.severity is Severity.WARNING
    assert "MAX_TOTAL_SIZE=900\n" in keeping.fix


def test_a_database_is_told_what_keeps_it_whole() -> None:
    """[together] AIBrix's RocksDB tier."""
    environment = {"AIBRIX_KV_CACHE_OL_ROCKSDB_ROOT": "/kv/rocks db"}
    assert list(keeps_a_database(environment, "/other", "process 5 (python)")) == []
    found = tuple(keeps_a_database(environment, "/kv", "process 5 (python)"))
    facts = Facts(mountpoint="/kv", status={}, habits_of_connectors=found)
    (finding,) = databases(facts) or []
    assert finding.severity is Severity.SERIOUS
    assert "RocksDB" in finding.problem
    assert "-v together '/kv/rocks db'" in finding.fix


@pytest.mark.parametrize(
    ("environment", "limit_bytes"),
    [
        ({"FLEXKV_SSD_CACHE_DIR": "/other;/kv/flexkv", "FLEXKV_SSD_CACHE_GB": "2"}, 2 << 30),
        ({"DYN_KVBM_DISK_CACHE_DIR": "/kv/kvbm", "DYN_KVBM_DISK_CACHE_GB": "3"}, 3 << 30),
        ({"FLEXKV_SSD_CACHE_DIR": "/other", "FLEXKV_SSD_CACHE_GB": "2"}, 0),
        ({"FLEXKV_SSD_CACHE_DIR": "/kv/flexkv"}, 0),
    ],
)
def test_slabs_have_a_limit(environment: dict[str, str], limit_bytes: int) -> None:
    found = list(from_environment(environment, "/kv", "process 5 (python)"))
    assert sum(limit.limit_bytes for limit in found) == limit_bytes


@pytest.mark.parametrize(
    "extra",
    [
        {"l2_pool_path": "/kv/marconi", "l2_bytes_to_use": 1 << 30},
        {"disk_path": "/kv/simple/pool", "disk_capacity_bytes": 1 << 30},
    ],
)
def test_slabs_of_vllm_have_a_limit(extra: dict[str, Any]) -> None:
    words = vllm({"kv_connector": "Any", "kv_connector_extra_config": extra})
    (limit,) = from_command_line(words, "/kv", "process 5 (vllm)")
    assert limit.limit_bytes == 1 << 30
    assert list(from_command_line(words, "/other", "process 5 (vllm)")) == []
