"""systemd/kvfs@.service, run by a real systemd as it stands: its command, within its bounds."""

import configparser
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.core.settings import Settings
from kvfs.machine.mountpoint_guard import unguard
from tests.support.clients.stepping import until
from tests.support.machines.own_systemd import UNIT, OwnSystemd, own_systemd
from tests.support.mounts.mounting import (
    PASSTHROUGH_WORKS,
    ROOT,
    kernel_has_passthrough,
    skip_without_mounts,
    workplace,
)

#: Each gives the service a mount namespace, in which the mount would be seen by nobody else.
HIDES_THE_MOUNT: Final = (
    *("PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectSystem", "ProtectHome"),
    *("ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs"),
    *("ProtectControlGroups", "ProtectProc", "ProcSubset", "DynamicUser"),
    *("ReadOnlyPaths", "ReadWritePaths", "InaccessiblePaths", "TemporaryFileSystem", "BindPaths"),
    *("RootDirectory", "RootImage", "MountFlags"),
)
#: linux/capability.h.
CAPABILITIES: Final = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_LINUX_IMMUTABLE": 9,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_SYSLOG": 34,
}
#: XATTR_SIZE_MAX of the kernel: the largest message between the channel and libfuse.
XATTR_BYTES: Final = 64 << 10
#: The services that docs/install.md orders behind the mount.
CLIENTS: Final = ("vllm", "lmcache")
SECURITY: Final = ROOT / "docs" / "security.md"
IMAGE_BYTES: Final = 400 << 20
PATHS: Final = ("daemon", "passthrough")
#: A FUSE mount that nobody serves: who looks at it hangs.
HANGS: Final = """\
import signal, sys
from mount.fuse import kernel
fd = kernel.open_device()
kernel.mount(fd, sys.argv[1], "/never", read_only=False)
print("there", flush=True)
signal.pause()
"""
SETTINGS: Final = """\
source = "{place}/{name}.img"
mountpoint = "{place}/{name}"
data_path = "{path}"
log_file = "{place}/{name}.log"
xattr_value_max_bytes = {xattr_bytes}
xattr_total_max_bytes = {xattr_total_bytes}
"""


#: A source that is a directory: the pool of an instance for one test.
SMALL: Final = """\
source = "{place}/{name}.pool"
mountpoint = "{place}/{name}"
capacity_bytes = "64MiB"
"""
SMALL_ONES: Final = ("watched", "broken", "ordered", "scraped")
#: The port of the drop-in's test, in the network namespace of its systemd.
PORT: Final = 9464
#: The unit's own times are minutes.
IMPATIENT: Final = "[Service]\nWatchdogSec=5\nTimeoutAbortSec=1\n"
#: It says what it finds when it starts.
CLIENT: Final = """\
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=sh -c 'findmnt -n -o FSTYPE {place}/ordered >{place}/found'
"""


class Unit:
    """One instance of the unit: its files, and what its systemd says of it."""

    def __init__(self, systemd: OwnSystemd, place: Path, path: str) -> None:
        self.systemd = systemd
        self.name = f"kvfs@{path}"
        self.path = path
        self.mountpoint = place / path
        self._log = place / f"{path}.log"

    def log(self) -> str:
        return self._log.read_text()

    def control(self, verb: str) -> None:
        self.systemd.run("systemctl", verb, self.name)

    def show(self, name: str) -> str:
        return self.systemd.show(self.name, name)

    def sh(self, script: str) -> str:
        """Run *script* beside the service, in the mountpoint's parent."""
        parent = str(self.mountpoint.parent)
        return self.systemd.run("sh", "-euc", f"cd {parent}; {script}").stdout

    def status(self) -> dict[str, Any]:
        said = self.systemd.run("kvfs", "status", str(self.mountpoint), "--json").stdout
        answer = json.loads(said)
        assert isinstance(answer, dict)
        return answer

    def is_mounted(self) -> bool:
        return f" {self.mountpoint} fuse.kvfs " in self.sh("cat /proc/mounts")


def drop_in(page: str, section: str) -> str:
    """Return the drop-in for a unit that *page* of docs shows, which begins with *section*."""
    text = (ROOT / "docs" / page).read_text()
    block = re.search(rf"^    \[{section}\]\n(?:    .*\n)+", text, re.MULTILINE)
    assert block is not None
    return re.sub(r"^ {4}", "", block[0], flags=re.MULTILINE)


def capabilities_of_this_machine() -> int:
    """Return those that a container, say, leaves to its root."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("CapBnd")), 16)


@contextlib.contextmanager
def in_use_by(unit: Unit, script: str) -> Iterator[None]:
    """Run *script*, which ends with cat, beside the service."""
    with subprocess.Popen(
        unit.systemd.inside("sh", "-euc", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(b"go\n")
        client.stdin.flush()
        assert client.stdout.readline() == b"go\n"  # it came to its last line
        yield
        client.stdin.close()


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    lines = UNIT.read_text().splitlines(keepends=True)
    # The only one that has a line for each value.
    parser.read_string("".join(line for line in lines if not line.startswith("DeviceAllow=")))
    return parser["Service"]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    skip_without_mounts()
    with workplace() as directory:
        for name in (*PATHS, *SMALL_ONES, "watched.pool", "ordered.pool", "scraped.pool"):
            (directory / name).mkdir()
        for name in PATHS:
            with (directory / f"{name}.img").open("wb") as image:
                image.truncate(IMAGE_BYTES)
        (directory / "hangs").mkdir()
        (directory / "systemd").mkdir()
        try:
            yield directory
        finally:  # what is guarded cannot be removed
            for name in (*PATHS, *SMALL_ONES):
                unguard(str(directory / name))


@pytest.fixture(scope="module")
def systemd(place: Path) -> Iterator[OwnSystemd]:
    settings = {
        f"{path}.toml": SETTINGS.format(
            place=place,
            name=path,
            path=path,
            xattr_bytes=XATTR_BYTES,
            xattr_total_bytes=2 * XATTR_BYTES,
        )
        for path in PATHS
    }
    for name in SMALL_ONES:
        settings[f"{name}.toml"] = SMALL.format(place=place, name=name)
    settings["scraped.toml"] += f'metrics_port = {PORT}\nlog_file = "{place}/scraped.log"\n'
    units = {"kvfs@watched.service.d/impatient.conf": IMPATIENT}
    units["kvfs@scraped.service.d/network.conf"] = drop_in("metrics.md", "Service")
    for name in CLIENTS:
        units[f"{name}.service"] = CLIENT.format(place=place)
        units[f"{name}.service.d/kvfs.conf"] = drop_in("install.md", "Unit").replace(
            "kvfs@kv", "kvfs@ordered"
        )
    with own_systemd(place / "systemd", settings, units=units) as booted:
        hangs = subprocess.Popen(
            booted.inside(sys.executable, "-c", HANGS, str(place / "hangs")),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert hangs.stdout is not None
        with hangs.stdout:
            assert hangs.stdout.readline() == "there\n"
        yield booted
    hangs.wait()


@pytest.fixture(params=PATHS)
def unit(request: pytest.FixtureRequest, systemd: OwnSystemd, place: Path) -> Iterator[Unit]:
    """A stopped one for each data path; its pool is blank the first time."""
    path = str(request.param)
    if path == "passthrough" and not (PASSTHROUGH_WORKS and kernel_has_passthrough()):
        pytest.skip("this kernel has no FUSE passthrough")
    one = Unit(systemd, place, path)
    yield one
    one.control("stop")
    assert not one.is_mounted()


def test_nothing_hides_the_mount_from_the_host(service: configparser.SectionProxy) -> None:
    assert not {name for name in service if service[name] != "no"} & set(HIDES_THE_MOUNT)
    # With a network of its own a service gets a mount namespace, too, unless it says no.
    assert service["PrivateMounts"] == "no"


def test_the_units_bounds_enclose_the_servers_own(service: configparser.SectionProxy) -> None:
    settings = Settings()
    assert int(service["TimeoutStartSec"]) > settings.start_timeout_s
    assert int(service["TimeoutStopSec"]) > settings.stop_timeout_s
    assert int(service["LimitNOFILE"]) == settings.open_files_max
    assert int(service["OOMScoreAdjust"]) == settings.oom_score_adj


def test_a_unit_without_its_settings_does_not_start(systemd: OwnSystemd) -> None:
    systemd.run("systemctl", "start", "kvfs@nobody")
    assert systemd.show("kvfs@nobody", "ConditionResult") == "no"
    assert systemd.show("kvfs@nobody", "ActiveState") == "inactive"


def test_systemd_has_nothing_to_say_about_it(systemd: OwnSystemd, place: Path) -> None:
    units = f"SYSTEMD_UNIT_PATH={place}/systemd/units"
    verify = ("systemd-analyze", "verify", "--man=no", "kvfs@daemon.service")
    done = systemd.run("env", units, *verify, "vllm.service", "lmcache.service")
    assert done.stdout + done.stderr == ""


def test_it_may_do_no_more_than_docs_say() -> None:
    """The exposure that docs/security.md states, of ten; systemd-analyze counts tenths of it."""
    (stated,) = re.findall(r"`systemd-analyze security` .*?: (\d\.\d)", SECURITY.read_text())
    assert float(stated) < 4.5
    worst = f"--threshold={int(float(stated) * 10)}"
    analyze = ["systemd-analyze", "security", "--offline=yes", worst, str(UNIT)]
    done = subprocess.run(analyze, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_it_makes_a_pool_and_serves_within_its_bounds(
    service: configparser.SectionProxy, unit: Unit
) -> None:
    """A blank image is formatted, beside a FUSE mount that hangs."""
    unit.control("start")  # returns at READY=1
    assert unit.show("ActiveState") == "active"
    server_pid = unit.status()["server_pid"]
    assert str(unit.status()["supervisor_pid"]) == unit.show("MainPID")
    assert unit.status()["data_path"] == unit.path
    namespaces = f"readlink /proc/1/ns/{{mnt,net}} /proc/{server_pid}/ns/{{mnt,net}}"
    *others, net = unit.sh(f"bash -c '{namespaces}'").split()
    assert others == [others[0], others[1], others[0]]
    assert net != others[1]
    # They are its own bounds that it serves within.
    process = dict(
        line.split(":\t", 1) for line in unit.sh(f"cat /proc/{server_pid}/status").splitlines()
    )
    wanted = sum(1 << CAPABILITIES[name] for name in service["CapabilityBoundingSet"].split())
    assert int(process["CapBnd"], 16) == wanted & capabilities_of_this_machine()
    assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2")
    # Whoever is ordered after it finds the mount, and may do there what he may elsewhere.
    unit.sh(f"cd {unit.path}; mkdir d; echo stored > d/tmp; mv d/tmp d/block; cat d/block")
    value = f"import os; os.setxattr('{unit.path}/d/block', 'user.note', bytes({XATTR_BYTES - 1}))"
    read = f"print(len(os.getxattr('{unit.path}/d/block', 'user.note')))"
    assert unit.sh(f'{sys.executable} -c "{value}; {read}"') == f"{XATTR_BYTES - 1}\n"
    assert unit.sh(f"ls {unit.path}/d") == "block\n"
    unit.control("reload")
    until(lambda: "settings reloaded" in unit.log(), "the version is the same")
    unit.systemd.run("kvfs", "umount", str(unit.mountpoint))
    unit.systemd.wait_for(unit.name, "ActiveState", "inactive")
    assert unit.show("Result") == "success"
    assert "settings reloaded" in unit.log()
    warnings = [line for line in unit.log().splitlines() if " WARNING " in line]
    # own_systemd.py gives it a pid namespace, which a machine's systemd does not. The attribute is
    # larger than what a file below can keep (XATTR_SIZE_MAX of linux/limits.h, with its header).
    expected = ("its own pid namespace", "its attributes are not kept")
    assert all(any(one in line for one in expected) for line in warnings), warnings
    assert "ERROR" not in unit.log()


@pytest.mark.parametrize("killed", ["server", "supervisor", "both"])
def test_after_a_crash_the_same_mount_serves_on_for_who_has_files_open(
    unit: Unit, killed: str
) -> None:
    """systemd keeps the open files of a supervisor that dies."""
    if not kernel_has_passthrough():
        pytest.skip("this kernel cannot send requests again")
    unit.control("start")
    unit.sh(f"cd {unit.path}; rm -rf kept d; echo stored > tmp; mv tmp kept; mkdir d")
    before = unit.status()
    mount_before = unit.sh(f"stat -c %d {unit.path}; grep -c ' {unit.path} ' /proc/mounts || true")
    script = f"cd {unit.mountpoint}/d; exec 3< ../kept 4> draft; cat; cat <&3; echo more >&4; ls"
    with subprocess.Popen(
        unit.systemd.inside("sh", "-euc", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        assert client.stdout.readline() == "go\n"
        pids = [before[f"{name}_pid"] for name in ("supervisor", "server") if killed != "server"]
        pids = pids[: 1 if killed == "supervisor" else 2] or [before["server_pid"]]
        # The server first: it ends by itself soon after its supervisor.
        unit.sh(f"kill -KILL {' '.join(map(str, reversed(pids)))}")
        assert client.communicate(timeout=60)[0] == "stored\ndraft\n"
        assert client.returncode == 0
    assert unit.sh(f"cat {unit.path}/d/draft {unit.path}/kept") == "more\nstored\n"
    unit.systemd.wait_for(unit.name, "ActiveState", "active")
    after = unit.status()
    assert after["server_pid"] != before["server_pid"]
    assert (after["supervisor_pid"] == before["supervisor_pid"]) == (killed == "server")
    assert str(after["supervisor_pid"]) == unit.show("MainPID")
    assert after["restarts"] == (1 if killed == "server" else 0)
    assert after["longest_pause_s"] > 0
    assert mount_before == unit.sh(
        f"stat -c %d {unit.path}; grep -c ' {unit.path} ' /proc/mounts || true"
    )
    assert "replaces a dead mount" not in unit.log()


def test_a_stop_leaves_nothing_of_the_mount_with_systemd(unit: Unit) -> None:
    """Else the pool could not be mounted by hand."""
    unit.control("start")
    assert int(unit.show("NFileDescriptorStore")) > 0
    unit.control("stop")
    assert unit.show("NFileDescriptorStore") == "0"
    unit.sh(f"kvfs mount --config /etc/kvfs/{unit.path}.toml; kvfs umount {unit.path}")


def test_a_server_whose_loop_has_stopped_is_killed_and_comes_back(
    systemd: OwnSystemd, place: Path
) -> None:
    unit = Unit(systemd, place, "watched")
    unit.control("start")
    unit.sh("echo stored > watched/tmp; mv watched/tmp watched/kept")
    assert unit.show("WatchdogUSec") == "5s"
    unit.sh(f"kill -STOP {unit.show('MainPID')}")
    systemd.wait_for(unit.name, "NRestarts", "1")
    systemd.wait_for(unit.name, "ActiveState", "active")
    assert unit.sh("cat watched/kept") == "stored\n"
    unit.control("stop")
    assert unit.show("Result") == "success"


def test_a_bare_mountpoint_takes_nothing(systemd: OwnSystemd, place: Path) -> None:
    """Not even from root: it would fill the disk of the machine."""
    unit = Unit(systemd, place, "watched")
    unit.control("start")
    unit.control("stop")
    with pytest.raises(OSError, match="not permitted"):
        (place / "watched" / "block").write_bytes(b"")
    unit.control("start")
    unit.sh("echo stored > watched/tmp; rm watched/tmp")
    unit.control("stop")
    unit.sh("kvfs umount --unguard watched; touch watched/block; rm watched/block")


def test_after_three_failures_it_waits_for_an_operator(systemd: OwnSystemd, place: Path) -> None:
    unit = Unit(systemd, place, "broken")
    (place / "broken.pool").write_text("somebody's notes")
    systemd.run("systemctl", "start", unit.name, check=False)
    systemd.wait_for(unit.name, "NRestarts", "3")
    systemd.wait_for(unit.name, "ActiveState", "failed")
    assert unit.show("ExecMainStatus") == "5"  # docs/exit-codes.md: something that is not a pool
    (place / "broken.pool").unlink()
    (place / "broken.pool").mkdir()
    unit.control("reset-failed")
    unit.control("start")
    assert unit.is_mounted()
    unit.control("stop")


def test_who_is_ordered_behind_it_finds_the_mount(systemd: OwnSystemd, place: Path) -> None:
    """And runs without it, if it cannot be had: a cache is no condition."""
    for name in CLIENTS:
        systemd.run("systemctl", "start", name)
        assert (place / "found").read_text() == "fuse.kvfs\n"
        systemd.run("systemctl", "stop", "kvfs@ordered")
        assert systemd.show(name, "ActiveState") == "active"


def test_a_port_for_metrics_takes_a_drop_in(systemd: OwnSystemd, place: Path) -> None:
    """By itself the unit has no network: the mount serves, and the log says what is missing."""
    unit = Unit(systemd, place, "scraped")
    scrape = ("curl", "--silent", f"http://127.0.0.1:{PORT}/metrics")
    systemd.run("ip", "link", "set", "lo", "up")
    unit.control("start")
    assert "kvfs_used_bytes" in systemd.run(*scrape).stdout
    unit.control("stop")
    (place / "systemd" / "units" / "kvfs@scraped.service.d" / "network.conf").unlink()
    systemd.run("systemctl", "daemon-reload")
    unit.control("start")
    assert "drop-in" in unit.log()
    assert systemd.run(*scrape, check=False).stdout == ""
    unit.control("stop")


def test_a_stop_ends_a_mount_in_use(unit: Unit) -> None:
    """It is refused to `kvfs umount`, and SIGTERM detaches it."""
    unit.control("start")
    with in_use_by(unit, f"cd {unit.mountpoint}; cat"):
        unit.control("stop")
        assert unit.show("Result") == "success"


def test_it_comes_back_from_a_settings_file_that_was_wrong(unit: Unit, place: Path) -> None:
    """What fails is said with the exit code of its kind, and costs nothing."""
    settings = f"/etc/kvfs/{unit.path}.toml"
    unit.sh(f"cp {settings} kept.toml; echo no_such_setting = 1 >> {settings}")
    started = unit.systemd.run("systemctl", "start", unit.name, check=False)
    assert started.returncode != 0
    unit.systemd.wait_for(unit.name, "ActiveState", "failed")  # it has tried again meanwhile
    assert unit.show("ExecMainStatus") == "2"
    unit.sh(f"cp kept.toml {settings}")
    unit.control("reset-failed")
    unit.control("restart")
    assert unit.show("ActiveState") == "active"
    assert os.path.exists(place / f"{unit.path}.img")
