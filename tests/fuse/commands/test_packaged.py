"""The program of the Debian package: what a shell sets for Python reaches no part of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT, run_kvfs
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.real_exec]


@pytest.fixture
def packaged() -> Iterator[tuple[Path, dict[str, str]]]:
    """A place with the program, and an environment whose PYTHONPATH nobody survives."""
    with blank_place() as place:
        text = (ROOT / "debian" / "kvfs.py").read_text()
        assert text.startswith("#!/usr/bin/python3 -I\n")
        assert '"/usr/lib/kvfs"' in text
        program = place / "kvfs"
        program.write_text(text.replace("/usr/bin/python3", sys.executable, 1))
        program.write_text(program.read_text().replace("/usr/lib/kvfs", str(ROOT)))
        program.chmod(0o755)
        foreign = place / "foreign"
        foreign.mkdir()
        for name in ("logging", "trio", "sitecustomize"):
            (foreign / f"{name}.py").write_text(f"open({str(foreign / 'was_run')!r}, 'x')\n")
        yield place, {**os.environ, "PYTHONPATH": str(foreign), "PYTHONOPTIMIZE": "2"}


def test_what_a_shell_sets_for_python_does_not_reach_the_server(
    packaged: tuple[Path, dict[str, str]],
) -> None:
    place, environment = packaged
    mount = small_mount(place)  # only looked at: the program below mounts it
    words = ("mount", *mount.flags, f"--log-file={mount.log_file}", mount.source, str(mount.path))

    def kvfs(*words: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [place / "kvfs", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=COMMAND_WAIT_S,
            check=True,
        )

    kvfs(*words)
    try:
        status = mount.status()
        for pid in (status["server_pid"], status["supervisor_pid"]):
            told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            of_python = {one.partition(b"=")[0] for one in told if one.startswith(b"PYTHON")}
            assert of_python <= {b"PYTHONPATH", b"PYTHONNOUSERSITE"}
            assert not any(b"foreign" in one for one in told)
        kvfs("upgrade", str(mount.path))
        assert mount.status()["upgrades"] == 1
        kvfs("umount", str(mount.path))
    finally:
        run_kvfs("umount", str(mount.path), check=False)
    assert not (place / "foreign" / "was_run").exists()
    assert not os.path.ismount(mount.path)
