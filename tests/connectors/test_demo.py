"""`make demo CONNECTOR=lmcache` compares what it says, and fails where a byte is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.core.errors import ToolMissing, UsageError, VerifyFailed
from tests.connectors import demo
from tests.connectors.connector import ROOT, Drivers
from tests.support.mounts.mounting import skip_without_mounts

pytestmark = pytest.mark.connectors
DEMO_WAIT_S = 110.0


def run_demo(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command that `make demo` runs."""
    return subprocess.run(
        [sys.executable, "-m", "tests.connectors.demo", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEMO_WAIT_S,
        check=False,
    )


def test_demo_compares_both_sides(connectors_python: Path) -> None:
    skip_without_mounts()
    done = run_demo(
        "lmcache", "--bytes", "64M", "--json", KVFS_CONNECTORS_PYTHON=str(connectors_python)
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["blocks"] == 2
    assert set(result["adapters"]) == set(demo.CONFIGURATIONS)
    for sides in result["adapters"].values():
        assert set(sides) == {"plain", "kvfs"}
        assert all(rate > 0 for figures in sides.values() for rate in figures.values())


def test_demo_fails_on_a_wrong_byte(
    drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is flipped between its store and its load, at the last lookup."""
    monkeypatch.setattr(demo, "BLOCK_BYTES", 1 << 20)
    lmcache = drivers.take("lmcache_l2")
    real_call = lmcache.call

    def call(verb: str, **arguments: object) -> object:
        if verb == "load":
            (block,) = tmp_path.glob("*.data")
            data = bytearray(block.read_bytes())
            data[len(data) // 2] ^= 1
            block.write_bytes(data)
        return real_call(verb, **arguments)

    monkeypatch.setattr(lmcache, "call", call)
    with pytest.raises(VerifyFailed, match="0 hold what was stored"):
        demo.measure(lmcache, tmp_path, {"type": "fs_native", "num_workers": 1}, [0], 0)
    monkeypatch.undo()
    drivers.give_back(lmcache, "lmcache_l2")


def test_demo_says_what_is_missing() -> None:
    done = run_demo("lmcache", KVFS_CONNECTORS_PYTHON="")
    assert done.returncode == ToolMissing.exit_code
    assert "install.sh" in done.stderr
    assert run_demo("lmcache", "--bytes", "1M").returncode in (
        UsageError.exit_code,
        ToolMissing.exit_code,
    )
