"""A folder of suites with its pools on encrypted drives, in a guest that has dm-crypt.

What is skipped there is what is skipped on any drive.
"""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.support.machines.junit import outcome_of
from tests.support.machines.kernels import kernel
from tests.support.machines.vm import PYTEST_INSIDE, Ran, boot, why_no_vm

pytestmark = [pytest.mark.proof, pytest.mark.in_guest]

#: Emulation is some ten times slower than a machine, and this one may be at load 20.
GUEST_WAIT_S: Final = 7000.0
#: What becomes of a block from its creation on, and a kernel that has both data paths.
FOLDER, SERIES = "tests/fuse/life", "6.12"
#: Emulated, all of it takes half an hour: a guest for each half.
HALVES: Final = ("passthrough", "not passthrough")
#: Fewer would be another folder than the one that every run of the suite tries.
TESTS_MIN: Final = 200


def test_a_folder_of_suites(tmp_path: Path) -> None:
    """Its tests on passthrough, and beside them in a second guest all others."""
    assert (why := why_no_vm()) is None, why
    image = kernel(SERIES)

    def run(which: str) -> Ran:
        (out := tmp_path / which.replace(" ", "-")).mkdir()
        chosen = ("-m", "not proof", "-k", which, "--junit-xml=/out/junit.xml")
        return boot(
            image,
            out,
            *("-m", "pytest", *PYTEST_INSIDE, *chosen, FOLDER),
            wait_s=GUEST_WAIT_S,
            modules=("fuse", "dm_crypt", "loop", "xfs"),
            environment={"KVFS_TEST_SOURCE": "encrypted"},
        )

    found: Counter[str] = Counter()
    with ThreadPoolExecutor() as guests:
        for which, ran in zip(HALVES, guests.map(run, HALVES), strict=True):
            junit = ran.console.with_name("junit.xml")
            assert junit.exists(), f"no answer from the guest:\n{ran.last_lines()}"
            ended = Counter(map(outcome_of, ElementTree.parse(junit).iter("testcase")))
            told = {"linux": SERIES, "folder": FOLDER, "tests": which, "seconds": ran.wall_s}
            print(json.dumps({**told, **ended}))
            assert ran.status == 0, ran.last_lines()
            found += ended
    assert found["passed"] > TESTS_MIN, found
