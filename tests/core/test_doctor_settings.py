"""What `kvfs doctor` reads of connectors' settings, and of the NFS server's table."""

import json
from pathlib import Path
from typing import Final

import pytest

from kvfs.client.nfs.nfsd import parse_exports
from kvfs.doctor.connector_settings import (
    from_command_line,
    from_environment,
    from_flag,
    from_settings,
    with_given,
)
from kvfs.doctor.facts import ConnectorLimit, Export
from kvfs.doctor.gather_connectors import limits_of_file

GIB: Final = 1 << 30
LMCACHE: Final = {"LMCACHE_LOCAL_DISK": "file:///kv/a", "LMCACHE_MAX_LOCAL_DISK_SIZE": "500"}
SGLANG_DIR: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
SGLANG_SIZE: Final = "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"
YAML: Final = """\
chunk_size: 256
local_disk: file:///kv/lmcache   # the tier
max_local_disk_size: 500.5       # GiB
"""


@pytest.mark.parametrize(
    ("environment", "limit_bytes"),
    [
        (LMCACHE, 500 * GIB),
        ({**LMCACHE, "LMCACHE_LOCAL_DISK": "/other,/kv/b"}, 500 * GIB),
        ({SGLANG_DIR: "/kv", SGLANG_SIZE: "200G"}, 200 * 10**9),
        ({SGLANG_DIR: "/kv", SGLANG_SIZE: "1Ti"}, 1 << 40),
        (
            {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/kv/m",
                "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "99999",
                "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": "12345",
            },
            12345,
        ),
        (
            {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/kv/m",
                "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "offset_allocator_storage_backend",
                "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "12345",
            },
            12345,
        ),
    ],
)
def test_limits_in_an_environment(environment: dict[str, str], limit_bytes: int) -> None:
    (limit,) = from_environment(environment, "/kv", "process 1 (x)")
    assert limit.limit_bytes == limit_bytes
    assert limit.origin == "process 1 (x)"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**LMCACHE, "LMCACHE_LOCAL_DISK": "/kvx/a"},
        {**LMCACHE, "LMCACHE_MAX_LOCAL_DISK_SIZE": "0"},
        {**LMCACHE, "LMCACHE_MAX_LOCAL_DISK_SIZE": "much"},
        {SGLANG_DIR: "/kv", SGLANG_SIZE: "?"},
    ],
)
def test_what_is_no_limit_below_the_mount(environment: dict[str, str]) -> None:
    assert list(from_environment(environment, "/kv", "")) == []


@pytest.mark.parametrize("is_one_word", [False, True])
def test_limits_in_a_command_line(is_one_word: bool) -> None:
    adapter = json.dumps({"type": "fs_native", "base_path": "/kv/a", "max_capacity_gb": 100})
    flag = [f"--l2-adapter={adapter}"] if is_one_word else ["--l2-adapter", adapter]
    (limit,) = from_command_line(["lmcache", "server", *flag], "/kv", "process 1 (x)")
    assert (limit.limit_bytes, limit.keeps_index) == (100 * GIB, False)


@pytest.mark.parametrize("number", ["inf", "nan", "1e999", "9" * 400])
def test_a_number_that_is_no_size_is_no_limit(number: str) -> None:
    assert not list(from_environment({**LMCACHE, "LMCACHE_MAX_LOCAL_DISK_SIZE": number}, "/kv", ""))
    assert not list(from_environment({SGLANG_DIR: "/kv", SGLANG_SIZE: f"{number}G"}, "/kv", ""))
    adapter = {"type": "nixl_store", "file_path": "/kv", "pool_size": 1, "file_size": number}
    assert not list(from_settings(json.dumps(adapter), "/kv", "file"))


def test_brackets_without_end_are_no_settings() -> None:
    assert not list(from_settings("[" * 100_000, "/kv", "file"))
    assert not list(from_command_line(["--l2-adapter", "[" * 100_000], "/kv", ""))


def test_a_command_line_that_is_no_adapter() -> None:
    words = ["vllm", "serve", "--l2-adapter", "{", "--l2-adapter"]
    assert list(from_command_line(words, "/kv", "")) == []


def test_pools_of_nixl_are_their_files() -> None:
    parameters = {"file_path": "/kv/n", "file_size": str(GIB)}
    adapter = {"type": "nixl_store", "pool_size": 64, "backend_params": parameters}
    (limit,) = from_settings(json.dumps(adapter), "/kv", "a.json")
    assert (limit.limit_bytes, limit.unit_bytes, limit.keeps_index) == (64 * GIB, GIB, True)


def test_limits_in_settings_files() -> None:
    (limit,) = from_settings(YAML, "/kv", "/etc/l.yaml")
    assert limit.limit_bytes == 500.5 * GIB
    assert (limit.setting, limit.file) == ("max_local_disk_size", "/etc/l.yaml")
    assert list(from_settings(YAML, "/other", "")) == []
    lines = "".join(f"export {name}='{value}'\n" for name, value in LMCACHE.items())
    (limit,) = from_settings(lines, "/kv", "/etc/env")
    assert (limit.limit_bytes, limit.file) == (500 * GIB, "/etc/env")


def test_equal_limits_count_each_and_a_file_that_is_known_once() -> None:
    limits = [ConnectorLimit("A", GIB, f"process {pid} (python)") for pid in (1, 2)]
    flag = ConnectorLimit("A", GIB, "--connector-limit 1G")
    assert with_given(limits, [flag, flag]) == (flag, flag, *limits)
    (given,) = from_settings(YAML, "/kv", "/etc/l.yaml")
    running = given._replace(origin="process 3 (python)")
    assert with_given([running], [given]) == (running,)


NESTED: Final = """\
# max_local_disk_size: 1
local_disk: /kv/lmcache
max_local_disk_size: 99999
extra_config:
  local_disk: /elsewhere
  max_local_disk_size: 1
"""


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        "".join(f"  {line}\n" for line in NESTED.splitlines()),
        json.dumps(
            {
                "local_disk": "/kv",
                "max_local_disk_size": 99999,
                "extra_config": {"max_local_disk_size": 1},
            }
        ),
    ],
)
def test_a_later_setting_of_that_name_hides_none(text: str) -> None:
    """What belongs to another setting is another one, and a comment is none."""
    (limit,) = from_settings(text, "/kv", "l.yaml")
    assert limit.limit_bytes == 99999 * GIB


def test_the_environment_wins_over_lmcaches_file() -> None:
    environment = {"LMCACHE_MAX_LOCAL_DISK_SIZE": "99999"}
    (limit,) = from_environment(environment, "/kv", "process 1 (x)", YAML, "/etc/l.yaml")
    assert limit == ConnectorLimit("LMCACHE_MAX_LOCAL_DISK_SIZE", 99999 * GIB, "process 1 (x)", GIB)
    (limit,) = from_environment({}, "/kv", "process 1 (x)", YAML, "/etc/l.yaml")
    assert (limit.setting, limit.file) == ("max_local_disk_size", "/etc/l.yaml")
    assert not list(from_environment({"LMCACHE_LOCAL_DISK": "/else"}, "/kv", "", YAML, "l.yaml"))


def test_a_flag_is_a_size() -> None:
    assert from_flag("500G").limit_bytes == 500 * GIB
    with pytest.raises(ValueError, match="not a size"):
        from_flag("much")


def test_exports_of_the_mount_and_below() -> None:
    etab = "/kv\t10.0.0.0/24(rw,sync,fsid=7)\n/kv/a\\040b\t*(ro)\n/kvx\t*(rw)\n/srv\t*(rw)\n# no\n"
    same = "/kv\t*(fsid=7)\n/srv\t*(fsid=7)\n"
    assert [export.same_fsid for export in parse_exports(same, "/kv")] == [("/srv",)]
    assert parse_exports(etab, "/kv") == (
        Export("/kv", "10.0.0.0/24", frozenset({"rw", "sync", "fsid=7"})),
        Export("/kv/a b", "*", frozenset({"ro"})),
    )


def test_of_a_settings_file_the_beginning_is_read(tmp_path: Path) -> None:
    """What is longer than a MiB is something else."""
    file = tmp_path / "lmcache.yaml"
    for comments, limits in ((1000, 1), (1 << 20, 0)):
        file.write_text("# comment\n" * (comments // 10 + 1) + YAML)
        assert len(limits_of_file(str(file), "/kv")) == limits
