"""systemd/kvfs@.service: systemd accepts it, and what it runs does what Type=notify promises."""

import configparser
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.config import Settings
from tests.support.mounting import KVFS, ROOT, run_kvfs, workplace

UNIT = ROOT / "systemd" / "kvfs@.service"
#: Each gives the service a mount namespace, in which the mount would be seen by nobody else.
HIDES_THE_MOUNT = (
    *("PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectSystem", "ProtectHome"),
    *("ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectClock"),
    *("ProtectControlGroups", "ProtectHostname", "ProtectProc", "ProcSubset", "DynamicUser"),
    *("ReadOnlyPaths", "ReadWritePaths", "InaccessiblePaths", "TemporaryFileSystem", "BindPaths"),
    *("RootDirectory", "RootImage", "MountFlags"),
)


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a source, a mountpoint and a settings file, cleaned up whatever happens."""
    with workplace() as directory:
        (directory / "pool").mkdir()
        (directory / "kv").mkdir()
        (directory / "kv.toml").write_text(
            f'source = "{directory / "pool"}"\nmountpoint = "{directory / "kv"}"\n'
        )
        try:
            yield directory
        finally:
            run_kvfs("umount", "--lazy", str(directory / "kv"), check=False)


def command(line: str, place: Path) -> list[str]:
    """Return what systemd would run for *line* of the instance whose settings are in *place*."""
    name = f"kvfs-test-{os.getpid()}"
    expanded = line.removeprefix("-").replace("/etc/kvfs/%i.toml", str(place / "kv.toml"))
    program, *arguments = shlex.split(expanded.replace("%i", name))
    assert program == "kvfs"
    assert "%" not in expanded.replace("%i", "")
    return [*KVFS, *arguments]


def test_nothing_hides_the_mount_from_the_host(service: configparser.SectionProxy) -> None:
    assert not set(service) & set(HIDES_THE_MOUNT)


def test_the_units_bounds_enclose_the_servers_own(service: configparser.SectionProxy) -> None:
    settings = Settings()
    assert int(service["TimeoutStartSec"]) > settings.start_timeout_s
    assert int(service["TimeoutStopSec"]) > settings.stop_timeout_s
    assert int(service["LimitNOFILE"]) == settings.open_files_max
    assert int(service["OOMScoreAdjust"]) == settings.oom_score_adj


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    # An instance, since a template alone is not checked; /bin/true in place of an installed kvfs.
    unit = tmp_path / "kvfs@kv.service"
    unit.write_text(
        UNIT.read_text().replace("=kvfs ", "=/bin/true ").replace("=-kvfs ", "=-/bin/true ")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(unit) not in done.stderr


@pytest.mark.needs_fuse
def test_it_starts_tells_systemd_reloads_and_stops(
    service: configparser.SectionProxy, place: Path
) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
        (place / "stderr").open("wb") as stderr,
    ):
        notified.bind(str(place / "notify"))
        notified.settimeout(60)
        server = subprocess.Popen(
            command(service["ExecStart"], place),
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": str(place / "notify")},
            stderr=stderr,
        )
        try:
            ready = notified.recv(4096).splitlines()
            assert b"READY=1" in ready
            assert f"STATUS=serving {place / 'pool'} at {place / 'kv'}".encode() in ready
            # What is ordered after the unit finds the mount, served by systemd's main process.
            (place / "kv" / "block").write_bytes(b"kept")
            status = json.loads(run_kvfs("status", str(place / "kv"), "--json").stdout)
            assert status["server_pid"] == server.pid
            assert status["name"] == f"kvfs-test-{os.getpid()}"
            assert service["ExecReload"] == "kill -HUP $MAINPID"
            server.send_signal(signal.SIGHUP)
            stop = subprocess.run(command(service["ExecStop"], place), cwd=ROOT, check=False)
            assert stop.returncode == 0
            assert server.wait(60) == 0
            assert notified.recv(4096) == b"STOPPING=1"
        finally:
            server.kill()
            server.wait()
    assert "settings reloaded" in (place / "stderr").read_text()


@pytest.mark.needs_fuse
def test_after_a_crash_the_unit_clears_the_way_for_its_restart(
    service: configparser.SectionProxy, place: Path
) -> None:
    for _start in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            address = f"\0kvfs-test-{os.getpid()}"  # systemd may use the abstract namespace
            notified.bind(address)
            notified.settimeout(60)
            server = subprocess.Popen(
                command(service["ExecStart"], place),
                cwd=ROOT,
                env={**os.environ, "NOTIFY_SOCKET": "@" + address[1:]},
                stderr=subprocess.DEVNULL,
            )
            try:
                assert notified.recv(4096).startswith(b"READY=1")
            finally:
                server.kill()
                server.wait()
            after = subprocess.run(command(service["ExecStopPost"], place), cwd=ROOT, check=False)
            assert after.returncode == 0
            assert not os.path.ismount(place / "kv")


def test_a_unit_without_its_settings_does_not_start() -> None:
    assert "ConditionPathExists=/etc/kvfs/%i.toml" in UNIT.read_text().splitlines()
