"""Upgrades under the load of clients of every kind: none notices, and a bad new version is no harm.

The other version is a copy of this tree that says another number (other_version.py).
"""

import json
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.kills.server_kills import (
    FEW_CLIENTS,
    KillDriver,
    load_of,
    skip_without_takeover,
    steady_load,
)
from tests.support.mounts.mounting import skip_without_mounts, workplace
from tests.support.mounts.other_version import Installed

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop, pytest.mark.real_exec]

#: Across so many of a hundred upgrades no call takes longer than a second.
QUICK_SHARE_MIN: Final = 0.99
#: It takes a minute until such a version is given up.
HANGS: Final = "hangs"
#: What of a new version is changed so that it is no good: the file, a line of it, another one.
BAD: Final = {
    "crashes at its start": ("mount/serve.py", "import pyfuse3\n", "raise SystemExit(3)\n"),
    HANGS: ("mount/serve.py", "import pyfuse3\n", "import time\n\ntime.sleep(600)\n"),
    "knows another format": (
        "kvfs/core/records.py",
        "INDEX_FORMAT: Final = 1\n",
        "INDEX_FORMAT: Final = 99\n",
    ),
}


@pytest.fixture
def installed() -> Iterator[Installed]:
    """Two versions of kvfs."""
    skip_without_mounts()
    with workplace("disk") as place:
        yield Installed(place)


def upgrade(driver: KillDriver, installed: Installed, times: int) -> None:
    """Upgrade to the other version and back, and so on."""
    for _ in range(times):
        driver.watch(driver.random.uniform(driver.soak.least_s, driver.soak.most_s))
        installed.switch()
        done = driver.upgrade()
        assert done.returncode == 0, done.stderr
        assert driver.mounted.status()["version"] == installed.version


def refuse(driver: KillDriver, installed: Installed, *kinds: str) -> None:
    """Try to upgrade to bad versions of these *kinds*: the old server serves on."""
    for why in kinds:
        path, line, bad = BAD[why]
        installed.change(path, line, bad)
        installed.switch()
        before = driver.mounted.status()
        done = driver.upgrade()
        assert done.returncode != 0, why
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert driver.mounted.status()["server_pid"] == before["server_pid"], why
        assert driver.mounted.status()["upgrades"] == before["upgrades"], why
        driver.watch(driver.soak.least_s)
        installed.switch()
        installed.change(path, bad, line)
        print(json.dumps({"new version": why, "said": done.stderr.strip()}))


def test_a_few_upgrades(installed: Installed) -> None:
    """[taken-over] To another version and back, and none to a version that is no good."""
    soak = load_of("passthrough", "full", "drive", most_s=0.4, kinds=FEW_CLIENTS)
    with steady_load(soak, FEW_CLIENTS, installed=installed.here) as driver:
        skip_without_takeover(driver.mounted)
        upgrade(driver, installed, 2)
        refuse(driver, installed, *(why for why in BAD if why != HANGS))
        assert driver.mounted.status()["upgrades"] == 2
        driver.next_kill()  # what serves on, and what it holds, is as good as before
    print(json.dumps(driver.report()))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("path", "room", "source"),
    [("passthrough", "full", "drive"), ("daemon", "roomy", "directory")],
)
def test_fifty_upgrades(installed: Installed, path: str, room: str, source: str) -> None:
    """[taken-over] To another version and back, under the load."""
    soak = load_of(path, room, source, most_s=1.0)
    with steady_load(soak, pause_s=0.01, installed=installed.here) as driver:
        skip_without_takeover(driver.mounted)
        upgrade(driver, installed, 50)
        assert driver.mounted.status()["upgrades"] == 50
        refuse(driver, installed, *BAD)
    report = driver.report()
    print(json.dumps(report))
    assert report["pause_s"]["above_1_s"] <= (1 - QUICK_SHARE_MIN) * 50, report
