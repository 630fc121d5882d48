"""The commands of kvfs that README and docs show, run as they stand, but for places and sizes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.client.servers import status_of
from kvfs.core.errors import SeriousFindings
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    loop_device,
    run_kvfs,
    skip_without_mounts,
    workplace,
)
from tests.support.rules.documented import of, quoted, statements

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

SIZE_BYTES: Final = 420 << 20
#: What doctor finds is the machine's.
FOUND: Final = {"kvfs doctor ": {0, SeriousFindings.exit_code}}


class Shell:
    """A shell in which the documents' paths and sizes stand for a test's own."""

    def __init__(self, place: Path, drive: str) -> None:
        self.kv = place / "kv"
        self._instead = {
            "/dev/nvme0n1p2": drive,
            "/dev/nvme0n1p1": drive,
            "/dev/nvme0n1": drive,
            "/dev/nvme1n1": f"{place}/kv1.img",
            "/var/lib/kvfs": f"{place}/pool",
            "/data/kv.img": f"{place}/kv.img",
            "/mnt/xfs": f"{place}/xfs",
            "report.html": f"{place}/report.html",
            "use.jsonl": f"{place}/use.jsonl",
            "3600": "1",
            "/kv": str(self.kv),
        }

    def run(self, command: str) -> str:
        """Run *command* and return what it printed."""
        said = command
        for word, instead in self._instead.items():
            said = " ".join(
                instead + part[len(word) :] if part == word or part.startswith(f"{word}/") else part
                for part in said.split(" ")
            )
        said = said.replace("200G", "100M").replace("100G", "1M")
        done = subprocess.run(
            ["bash", "-c", said],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
        fine = next((codes for start, codes in FOUND.items() if command.startswith(start)), {0})
        assert done.returncode in fine, f"{said}\n{done.stdout}"
        return done.stdout

    def unmount(self) -> None:
        """Unmount what is mounted."""
        if os.path.ismount(self.kv):
            run_kvfs("umount", str(self.kv))


@pytest.fixture
def shell() -> Iterator[Shell]:
    skip_without_mounts()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(workplace())
        drive = stack.enter_context(loop_device(SIZE_BYTES))
        for name in ("kv", "pool", "xfs"):
            (place / name).mkdir()
        shell = Shell(place, drive)
        stack.callback(shell.unmount)
        yield shell


def store(directory: Path, name: str = "block") -> None:
    """Store a block as connectors do."""
    directory.mkdir(exist_ok=True)
    (directory / "block.tmp").write_bytes(bytes(1 << 20))
    (directory / "block.tmp").rename(directory / name)


def test_use_it(shell: Shell) -> None:
    """README from a drive to the end, on each kind of source."""
    shown = [one.text for one in statements() if one.document == "README.md"]
    # The demo is a minute of its own (test_demo.py).
    commands = [one for one in shown if one.startswith(("kvfs ", "mkdir ")) and "demo" not in one]
    for command in commands:
        if "kvfs mount " in command:
            shell.unmount()
        if command.startswith("kvfs evict "):
            store(shell.kv, "meta-llama-SEP-Llama-3.1-8B@0x02000002@0a@00ff.data")
        if command.startswith("kvfs pin "):
            store(shell.kv / "system-prompts")
        shell.run(command)
    assert not os.path.ismount(shell.kv)
    assert (shell.kv.parent / "kv.img").stat().st_size > 100 << 20
    image = shell.kv.parent / "kv.img"
    run_kvfs("mount", str(image), str(shell.kv))


def test_evicting_by_hand(shell: Shell) -> None:
    run_kvfs("mount", str(shell.kv.parent / "pool"), str(shell.kv), "--capacity=256M")
    for command in of("docs/eviction.md", "kvfs "):
        for name in ("lmcache", "system-prompts"):
            store(shell.kv / name)
        store(shell.kv / "lmcache", "meta-llama-SEP-Llama-3.1-8B@0x02000002@0a@00ff.data")
        shell.run(command)
    assert os.getxattr(shell.kv / "system-prompts", "user.kvfs.pin") == b"1"
    (age,) = of("docs/eviction.md", "setfattr ")
    shell.run(age)
    assert os.getxattr(shell.kv / "lmcache", "user.kvfs.ttl") == b"7d"


def test_the_cache_is_watched(shell: Shell) -> None:
    run_kvfs("mount", str(shell.kv.parent / "pool"), str(shell.kv), "--capacity=256M")
    rates, report = of("docs/status.md", "kvfs ")
    assert '"hit_rate"' in shell.run(rates)
    shell.run(report)
    assert (shell.kv.parent / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("page", ["docs/sizing.md", "docs/troubleshooting.md"])
def test_what_a_page_says_to_look_at_first(shell: Shell, page: str) -> None:
    run_kvfs("mount", str(shell.kv.parent / "pool"), str(shell.kv), "--capacity=256M")
    for command in of(page, "kvfs "):
        if not command.startswith("kvfs size "):
            assert str(shell.kv) in shell.run(command)


def test_metrics_are_fetched(shell: Shell) -> None:
    """By each way that docs/metrics.md shows; the file lies where node_exporter looks for it."""
    place = shell.kv.parent
    (fetch,) = of("docs/metrics.md", "curl ")
    mounts = of("docs/metrics.md", "kvfs mount ")
    for command in mounts:
        shell.run(command.replace("/var/lib/prometheus/node-exporter", str(place)))
        name = status_of(str(shell.kv))["name"]
        assert "kvfs_capacity_bytes{" in shell.run(fetch.replace("/kv.metrics", f"/{name}.metrics"))
        if "textfile" in command:
            until((place / "kvfs.prom").exists, "the file is written")
        shell.unmount()
    assert len(mounts) == 2


def test_several_drives(shell: Shell) -> None:
    (shell.kv.parent / "kv1.img").touch()
    os.truncate(shell.kv.parent / "kv1.img", SIZE_BYTES)
    commands = of("docs/drives.md", "kvfs ")
    assert len(commands) == 6
    for command in commands:
        shell.run(command)


def test_a_drive_beside_xfs(shell: Shell) -> None:
    """What is compared in docs/performance.md; the measurement itself takes minutes."""
    (mount,) = of("docs/performance.md", "kvfs mount ")
    shell.run(mount)
    store(shell.kv / "a")
    shell.unmount()
    run_kvfs("destroy", shell._instead["/dev/nvme0n1"], "--yes")
    (xfs,) = of("docs/performance.md", "mkfs.xfs ")
    shell.run(xfs)
    try:
        store(shell.kv.parent / "xfs" / "a")
    finally:
        subprocess.run(["umount", shell.kv.parent / "xfs"], check=True)


def test_what_sentences_say_to_run(shell: Shell) -> None:
    """Whole commands in docs/connectors/: a mount with an owner, a directory, its policies."""
    said = [one.text for one in quoted("kvfs") if "-o uid=1000" in one.text]
    assert said
    for command in said:
        shell.unmount()
        shell.run(command)
        assert shell.kv.stat().st_uid == 1000
    commands = [one.text for program in ("mkdir", "setfattr") for one in quoted(program)]
    commands = [command for command in commands if " /kv/" in command]
    assert len(commands) >= 3
    for command in commands:
        (shell.kv / Path(command.split()[-1]).relative_to("/kv")).mkdir(exist_ok=True)
        shell.run(command)
    assert os.getxattr(shell.kv / "lmcache", "user.kvfs.evict") == b"never"
