"""The commands that docs/troubleshooting.md has beside each symptom, run as they stand.

But for the places that their words in capitals mean: a mount, an image, a file and a directory.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import SeriousFindings
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    ROOT,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

SYMPTOMS: Final = (
    (ROOT / "docs" / "troubleshooting.md")
    .read_text()
    .partition("## What `kvfs doctor` looks at")[0]
)
ROWS: Final = [
    (symptom, re.findall(r"`([^`]+)`", commands))
    for symptom, commands in re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", SYMPTOMS, re.MULTILINE)
    if symptom not in ("symptom", "a connector reports")
]
COMMANDS: Final = sorted({command for _, commands in ROWS for command in commands})
#: What cannot be run on a test's machine as it stands, and where it is tried.
NOT_RUN: Final = {
    "dpkg -l kvfs": "tests/system/test_install.py installs the package",
    "journalctl -u kvfs@kv": "tests/system/test_install.py runs the service",
    "systemctl status kvfs@kv": "tests/system/test_install.py runs the service",
    "lsof": "is not on every machine",
    "modprobe fuse": "a kernel may have it built in",
    "smartctl -a": "wants a real drive",
    "top": "is a screen of its own",
    "kvfs bench compare --mount /kv --baseline /mnt/xfs": "measures for minutes",
    "kvfs upgrade MOUNT": "tests/system/test_upgrades.py",
    "kvfs umount MOUNT": "run at the end of each test",
}
#: What has nothing to say on a machine where nothing is the matter.
MAY_BE_SILENT: Final = ("dmesg", "getfattr", "losetup")
#: Behind a command that lacks its last word: what an operator adds.
ADDED: Final = {
    "kvfs fsck --repair": "POOL",
    "kvfs debug --hash-names": "--output BUNDLE",
    "ls -l": "MOUNT",
    "ls -ld": "MOUNT",
    "lsattr -d": "/kv/DIR",
}
#: Exit codes other than 0 that are an answer, too.
ANSWERS: Final = {
    "kvfs doctor": {SeriousFindings.exit_code},
    "findmnt": {1},  # nothing is mounted so
    "lsattr": {1},  # a file system without such flags
}


@pytest.fixture(scope="module")
def words() -> Iterator[dict[str, str]]:
    """What the words in capitals mean: places of a mount with a block in it, and others."""
    skip_without_mounts()
    with workplace() as place:
        for name in ("pool", "other", "kv"):
            (place / name).mkdir()
        run_kvfs("mkfs", str(place / "other"))
        run_kvfs("mount", str(place / "pool"), str(place / "kv"), "--capacity=64M")
        try:
            (place / "kv" / "dir").mkdir()
            (place / "kv" / "dir" / "block.tmp").write_bytes(bytes(1 << 20))
            (place / "kv" / "dir" / "block.tmp").rename(place / "kv" / "dir" / "block")
            run_kvfs("sync", str(place / "kv"))
            (place / "image").write_bytes(b"")
            block = str(place / "kv" / "dir" / "block")
            yield {
                "MOUNT": str(place / "kv"),
                "IMAGE": str(place / "image"),
                "POOL": str(place / "other"),
                "BUNDLE": str(place / "bundle.tar.gz"),
                "PATH": block,
                "/kv/FILE": block,
                "/kv/DIR": str(place / "kv" / "dir"),
            }
        finally:
            run_kvfs("umount", str(place / "kv"))


def test_there_are_thirty_rows_each_with_a_command() -> None:
    assert len(ROWS) >= 30
    assert [symptom for symptom, commands in ROWS if not commands] == []
    assert not NOT_RUN.keys() - set(COMMANDS)
    assert not ADDED.keys() - set(COMMANDS)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - NOT_RUN.keys()))
def test_a_command_beside_a_symptom_runs(command: str, words: dict[str, str]) -> None:
    typed = shlex.split(f"{command} {ADDED.get(command, '')}")
    typed = [words.get(word, word) for word in typed]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    done = subprocess.run(
        typed,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )
    fine = {0}.union(*(codes for start, codes in ANSWERS.items() if command.startswith(start)))
    assert done.returncode in fine, f"{typed}\n{done.stdout}{done.stderr}"
    assert done.stdout or done.returncode or command.startswith(MAY_BE_SILENT)
