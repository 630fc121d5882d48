"""Encrypted pools on dm-crypt, in guests with Debian's kernels: tests/guest/test_encryption.py."""

import json
from pathlib import Path
from typing import Final

import pytest

from tests.support.machines.kernels import kernel
from tests.support.machines.vm import PYTEST_INSIDE, boot, why_no_vm

pytestmark = [pytest.mark.proof, pytest.mark.in_guest]

#: Emulation is some ten times slower than a machine, and this one may be at load 20.
GUEST_WAIT_S: Final = 5400.0
MODULES: Final = ("fuse", "dm_crypt", "loop", "xfs")
DRIVE_BYTES: Final = 512 << 20


@pytest.mark.parametrize("series", ["6.1", "6.12"])
def test_encrypted_pools(series: str, tmp_path: Path) -> None:
    assert (why := why_no_vm()) is None, why
    drives = [tmp_path / "b", tmp_path / "c"]
    for drive in drives:
        with drive.open("wb") as file:
            file.truncate(DRIVE_BYTES)
    out = tmp_path / "out"
    out.mkdir()
    ran = boot(
        kernel(series),
        out,
        *("-m", "pytest", *PYTEST_INSIDE, "tests/guest/test_encryption.py"),
        wait_s=GUEST_WAIT_S,
        drives=drives,
        modules=MODULES,
    )
    assert ran.result, f"no answer from the guest:\n{ran.last_lines()}"
    for name, found in ran.result.items():
        told = {"linux": series, "test": name.partition("::")[2], "seconds": found["seconds"]}
        print(json.dumps({**told, "outcome": found["outcome"]}))
    failed = [name for name, found in ran.result.items() if found["outcome"] != "passed"]
    assert not failed, ran.last_lines()
    assert ran.status == 0, ran.last_lines()
