"""Programs that save a tensor a file: safetensors renames, torch and joblib write in place."""

from typing import ClassVar

import pytest

from tests.connectors.contract import BlockFiles, Deletes
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool

pytestmark = pytest.mark.connectors


class TestSafetensors(BlockFiles, Deletes, EvictedQuietly, FillsThePool):
    """``save_file``."""

    driver: ClassVar = ("saved_tensors", "safetensors")
    tested_version = "safetensors 0.8.0"
    overwrites = True
    times = 5


class TestTorchSave(TestSafetensors):
    """``torch.save``, in a directory without leases."""

    driver: ClassVar = ("saved_tensors", "torch")
    config: ClassVar = {"lease": "none"}
    tested_version = "torch 2.13.0"


class TestJoblibDump(TestTorchSave):
    """``joblib.dump``, the same."""

    driver: ClassVar = ("saved_tensors", "joblib")
    tested_version = "joblib 1.6.0"


class TestJoblibDumpDaemonPath(TestJoblibDump):
    """Every byte through the daemon."""

    data_path = "daemon"
