"""LMCache 0.5 multi-process mode: the L2 adapters ``fs`` (Python) and ``fs_native`` (C++)."""

import json
import os
from pathlib import Path
from typing import ClassVar

import pytest

from tests.connectors.connector import run
from tests.connectors.contract import MIB, BlockFiles, Deletes
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool

pytestmark = pytest.mark.connectors

DEEPSEEK_16_TOKENS_BYTES = 1124352
"""16 tokens of DeepSeek-V3's cache: not a multiple of 4096, as real blocks may be."""


class LMCacheL2(BlockFiles, Deletes, EvictedQuietly, FillsThePool):
    """What the variants share; LMCache's own bench is one more test of each."""

    driver = ("lmcache_l2",)
    tested_version = "lmcache 0.5.6"

    def test_works_lmcache_bench(self, connectors_python: Path, kv_dir: Path) -> None:
        """`lmcache bench l2` stores, looks up and loads, and its own verification passes."""
        spec = json.dumps(self.config["spec"]).replace("KV_DIR", str(kv_dir))
        options = (
            "--num-keys=4 --in-flight=2 --data-size-kb=2048 --l1-align-bytes=4096 --rounds=2 "
            "--warmup-rounds=1 --lookup-max-hit-rate=1.0 --no-skip-verify --format=json"
        )
        command = ["-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", spec]
        printed = run(connectors_python, [*command, *options.split()])
        report = json.JSONDecoder().raw_decode(printed[printed.index("{\n") :])[0]["metrics"]
        sections = [value for name, value in report.items() if name.startswith("op_")]
        assert [section["operation"] for section in sections] == ["Store", "Lookup", "Load"]
        assert {section["total_success"] for section in sections} == {2 * 4 * 2}


class TestFs(LMCacheL2):
    """The Python adapter through the page cache."""

    config: ClassVar = {"slots": 12, "spec": {"type": "fs", "base_path": "KV_DIR"}}
    size_bytes = DEEPSEEK_16_TOKENS_BYTES


class TestFsTemporaryDirectory(LMCacheL2):
    """The Python adapter with its drafts in a directory of their own."""

    config: ClassVar = {
        "slots": 12,
        "spec": {"type": "fs", "base_path": "KV_DIR", "relative_tmp_dir": "drafts"},
    }

    @pytest.fixture(autouse=True)
    def drafts(self, kv_dir: Path) -> None:
        """Their names do not say what they are; docs/connectors/lmcache.md says how to say it."""
        (kv_dir / "drafts").mkdir()
        os.setxattr(kv_dir / "drafts", "user.kvfs.drafts", b"owner")


class TestFsDirect(LMCacheL2):
    """The Python adapter with O_DIRECT."""

    o_direct = True
    config: ClassVar = {
        "slots": 12,
        "spec": {"type": "fs", "base_path": "KV_DIR", "use_odirect": True},
    }


class TestFsNative(LMCacheL2):
    """The C++ adapter through the page cache."""

    config: ClassVar = {
        "slots": 12,
        "spec": {"type": "fs_native", "base_path": "KV_DIR", "num_workers": 4},
    }
    size_bytes = DEEPSEEK_16_TOKENS_BYTES


class TestFsNativeDirect(LMCacheL2):
    """The C++ adapter with O_DIRECT, as LMCache recommends for NVMe."""

    o_direct = True
    config: ClassVar = {
        "slots": 12,
        "spec": {"type": "fs_native", "base_path": "KV_DIR", "num_workers": 4, "use_odirect": True},
    }
    size_bytes = 4 * MIB


class TestFsNativeDirectDaemonPath(TestFsNativeDirect):
    """The C++ adapter with O_DIRECT without passthrough: every byte goes through the daemon."""

    data_path = "daemon"
