"""One user's flood of loads that wait for a silent drive takes nobody else's place to wait."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import NOBODY, OTHER
from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, mounted_on
from tests.support.mounts.mounting import run_kvfs

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

#: More than may wait (mount/files/device_shares.py).
FLOOD: Final = 160
HONEST: Final = 3
#: An open reads the block and compares it, so it waits for the drive; and none is given up here.
SETTINGS: Final = (
    *("--set=verify=open", "--set=checksum_share=1"),
    *("--set=device_silent_s=1", "--set=device_deadline_s=250", "--set=silent_max_s=100"),
)
#: Opens each block in a thread of its own, and prints how often each errno came; 0: none.
LOADS: Final = """\
import collections, json, sys, threading
ended = collections.Counter()
def load(path):
    try:
        with open(path, "rb") as file:
            code = 0 if file.read() == b"w" * 8192 else -1
    except OSError as error:
        code = error.errno
    ended[code] += 1
threads = [threading.Thread(target=load, args=(path,)) for path in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(ended))
"""


def loads(uid: int, blocks: list[Path]) -> "subprocess.Popen[str]":
    """Begin to load *blocks* as *uid*, all at once."""
    return subprocess.Popen(
        [sys.executable, "-c", LOADS, *map(str, blocks)],
        stdout=subprocess.PIPE,
        text=True,
        user=uid,
        group=uid,
        extra_groups=[],
    )


def told_by(process: "subprocess.Popen[str]") -> dict[int, int]:
    """Return how often each errno came."""
    said, _ = process.communicate()
    return {int(code): count for code, count in json.loads(said).items()}


@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_one_users_waits_for_a_silent_drive_refuse_nobody_elses(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-aside] The flood gets EIO, the honest user's loads wait and are answered."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        blocks = [mounted.path / f"{number:03}" for number in range(FLOOD + HONEST)]
        for block in blocks:
            block.with_suffix(".tmp").write_bytes(b"w" * 8192)
            os.rename(block.with_suffix(".tmp"), block)
        run_kvfs("sync", str(mounted.path))
        mounted.stop()
        mounted.start()

        def waits_of(uid: int) -> int:
            row = mounted.status()["tenants"].get(str(uid), {})
            return int(row.get("device_waits", 0))

        with drive.silent():
            flood = loads(NOBODY, blocks[HONEST:])
            until(lambda: mounted.status()["errors"].get("EIO", 0) > 0, "the flood is refused")
            honest = loads(OTHER, blocks[:HONEST])
            until(lambda: waits_of(OTHER) == HONEST, "the honest user waits")
            assert waits_of(NOBODY) > FLOOD // 2
            assert honest.poll() is None
        assert told_by(honest) == {0: HONEST}
        flooded = told_by(flood)
        assert set(flooded) == {0, errno.EIO}, flooded
        assert sum(flooded.values()) == FLOOD
        until(lambda: waits_of(NOBODY) == 0, "the account is even")
