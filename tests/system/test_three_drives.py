"""The suites of tests/fuse with a pool of three drives below the mounts that they share.

Those that make a pool of their own have it on what they say.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.support.machines.junit import outcome_of

pytestmark = [pytest.mark.proof, pytest.mark.needs_loop]

SUITE: Final = "tests/fuse"
#: Fewer would be another folder than the one that every run of the suite tries.
TESTS_MIN: Final = 3000


def test_the_suites_of_one_mount(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    words = ("-n", "2", "--dist", "loadscope", "-m", "not proof", f"--junit-xml={junit}", SUITE)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", *words],
        env=os.environ | {"KVFS_TEST_SOURCE": "three"},
        capture_output=True,
        text=True,
        check=False,
    )
    ended = Counter(map(outcome_of, ElementTree.parse(junit).iter("testcase")))
    print(json.dumps({"folder": SUITE, "drives": 3, **ended}))
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert ended["passed"] > TESTS_MIN, ended
