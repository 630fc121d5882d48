"""The benchmark of the first token, small: a load leads to the logits of the computation."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvfs.core.errors import VerifyFailed
from tests.bench.first_token_report import FULL, POOL, RECOMPUTED, RESTARTED, XFS
from tests.bench.measure_first_token import Load, Model
from tests.connectors.connector import QUIET, ROOT
from tests.support.mounts.mounting import skip_without_mounts

pytestmark = [pytest.mark.connectors, pytest.mark.drops_caches]
WAIT_S = 120.0
SMALL = Load(
    tokens=(256,), rounds=1, shape="tiny", device="cpu", threads=2, device_bytes=0,
    full_device_bytes=0, full_tokens=256, hot=0, data_path="auto", backing="", stop_after_s=0.0,
)  # fmt: skip


def test_measures_each_place(connectors_python: Path) -> None:
    """On the data path that this machine has."""
    skip_without_mounts()
    flags = "--shape tiny --tokens 256 --rounds 1 --full-tokens 512 --hot 4"
    sizes = "--device-size 400M --full-device-size 400M"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.measure_first_token", *flags.split(), *sizes.split()],
        cwd=ROOT,
        env={**os.environ, **QUIET, "KVFS_CONNECTORS_PYTHON": str(connectors_python)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    loads = {(place, cache) for place in (XFS, POOL, RESTARTED) for cache in ("cold", "warm")}
    places = [(row["place"], row["cache"]) for row in report["rows"] if row["place"] != FULL]
    assert sorted(places) == sorted(loads | {(RECOMPUTED, "")})
    assert all(row["median_s"] > 0 for row in report["rows"])
    full = report["full"]
    assert full["stored_bytes"] >= 5 * full["capacity_bytes"]
    assert full["hot_hits"] + full["hot_misses"] == full["others"]
    assert full["hot_hits"] > full["others"] / 2
    assert full["hot_hits"] == sum(row["runs"] for row in report["rows"] if row["place"] == FULL)


def test_fails_on_a_wrong_bit(connectors_python: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        model = Model(stack, str(connectors_python), SMALL)
        model.ask("recompute", prompt=1, tokens=256)
        model.ask("store", directory=str(tmp_path))
        assert model.ask("load", directory=str(tmp_path), prompt=1, tokens=256)["hit"]
        layer = sorted(tmp_path.iterdir())[1]
        data = bytearray(layer.read_bytes())
        data[len(data) // 3] ^= 1
        layer.write_bytes(data)
        with pytest.raises(VerifyFailed, match="1 layers have other bytes"):
            model.ask("load", directory=str(tmp_path), prompt=1, tokens=256)
        layer.unlink()
        answer = model.ask("load", directory=str(tmp_path), prompt=1, tokens=256)
        assert (answer["hit"], answer["missing"]) == (False, 1)
