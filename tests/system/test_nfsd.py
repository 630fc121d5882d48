"""The kernel's NFS server and client over kvfs, in guests with Debian's kernels: tests/guest/.

Linux 6.1 has no passthrough, 6.12 has. Each file of that folder runs in a guest of its own; what
the guest's kernel, nfsd's helpers and kvfs logged is kept among pytest's temporary files.
"""

import json
import os
from pathlib import Path
from typing import Final

import pytest

from tests.support.kernel.calls import write_file
from tests.support.machines.kernels import kernel
from tests.support.machines.vm import PYTEST_INSIDE, boot, why_no_vm
from tests.support.mounts.mounting import ROOT, Mounted

pytestmark = pytest.mark.proof

FILES: Final = sorted(path.name for path in (ROOT / "tests" / "guest").glob("test_nfsd_*.py"))
#: Emulation is some ten times slower than a machine.
GUEST_WAIT_S: Final = 1800.0
#: How many names are listed, by this file. They are made here: emulated, each costs some 20 ms.
NAMES: Final = 100_000
LISTED: Final = "test_nfsd_names.py"
_FILLED_BYTES: Final = 4 << 30


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with a pool that has a directory of so many names."""
    place = tmp_path_factory.mktemp("filled")
    image = place / "image"
    with Mounted(image, place / "kv", f"--capacity={_FILLED_BYTES}") as mounted:
        (mounted.path / "names").mkdir()
        for number in range(NAMES):
            os.mknod(mounted.path / "names" / f"{number:06}")
        write_file(mounted.path / "wanted", json.dumps({"count": NAMES}).encode())
    return image


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("series", ["6.1", "6.12"])
def test_nfsd(series: str, file: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert (why := why_no_vm()) is None, why
    drives = [request.getfixturevalue("filled")] if file == LISTED else []
    named = {name: value for name, value in os.environ.items() if name.startswith("KVFS_")}
    ran = boot(
        kernel(series),
        tmp_path,
        *("-m", "pytest", *PYTEST_INSIDE, f"tests/guest/{file}"),
        wait_s=GUEST_WAIT_S,
        drives=drives,
        environment=named,
    )
    assert ran.result, f"no answer from the guest:\n{ran.last_lines()}"
    for name, found in ran.result.items():
        told = {"linux": series, "test": name.partition("::")[2], "seconds": found["seconds"]}
        print(json.dumps({**told, "outcome": found["outcome"]}))
    print(f"guest of Linux {series}: {ran.wall_s:.0f} s; logs in {tmp_path}")
    failed = [name for name, found in ran.result.items() if found["outcome"] != "passed"]
    assert not failed, ran.last_lines()
    assert ran.status == 0, ran.last_lines()
