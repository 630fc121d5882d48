"""``kvfs doctor`` on real mounts and files: what it gathers, how it ends, what it prints."""

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.cli.main import main
from kvfs.client.control_socket import ServerGone
from kvfs.client.servers import ServerAnswer
from kvfs.core.errors import NotMounted, NotRoot, SeriousFindings, ServeFailed, UsageError
from kvfs.core.mount_name import name_of, socket_path
from kvfs.doctor.examine import RULES
from kvfs.doctor.facts import Disk, ReadAheadSetting
from kvfs.doctor.gather import gather
from kvfs.doctor.gather_drives import Drives
from kvfs.doctor.gather_machine import parse_ranges, xfs_on
from kvfs.doctor.machine_rules import READ_AHEAD_WANTED_BYTES
from kvfs.machine.mount_table import mounts
from tests.support.doctor.sysfs_tree import write_tree
from tests.support.mounts.mounting import KVFS, Mounted, run_kvfs, skip_without_mounts, workplace

MIB = 1 << 20


@pytest.fixture(scope="module")
def doctored() -> Iterator[Mounted]:
    """A mount on the daemon path, asked for: there is always a finding."""
    skip_without_mounts()
    with workplace() as directory:
        (directory / "pool").mkdir()
        flags = ("--data-path=daemon", "--capacity", "1G")
        with Mounted(directory / "pool", directory / "kv", *flags) as mounted:
            yield mounted


@pytest.mark.needs_fuse
def test_doctor_gathers_every_fact(doctored: Mounted) -> None:
    facts = gather(str(doctored.path))
    assert facts.kind == "directory"
    assert facts.source == doctored.source
    assert facts.server_pid == doctored.server_pid
    assert facts.backing is not None
    assert facts.backing.fs_type == "tmpfs"
    assert facts.backing.free_bytes > 0
    assert facts.disks == ()
    assert facts.fuse_read_ahead is not None
    if not os.statvfs("/sys").f_flag & os.ST_RDONLY:  # else the server could not set it
        assert facts.fuse_read_ahead.size_bytes == READ_AHEAD_WANTED_BYTES
    assert facts.dirty is not None
    assert facts.limits is not None
    assert facts.limits.open_files > 3
    assert facts.cpus is not None
    assert facts.cpus.allowed
    assert facts.request_timeout_max_s is not None
    assert facts.wake is not None
    assert facts.wake.round_trip_us > 0


@pytest.mark.needs_fuse
def test_doctor_tells_why_bytes_go_through_the_server(doctored: Mounted) -> None:
    done = run_kvfs("doctor", str(doctored.path), "--json", check=False)
    report = json.loads(done.stdout)
    assert report["mountpoint"] == str(doctored.path)
    (finding,) = [one for one in report["findings"] if one["check"] == "passthrough"]
    assert finding["severity"] == "warning"
    assert "--data-path=auto" in finding["fix"]
    checks = {one["check"] for one in report["findings"]} | {
        *report["passed"],
        *report["undecided"],
    }
    assert checks == set(RULES)


@pytest.mark.needs_fuse
def test_doctor_finds_a_connectors_limit_in_its_environment(doctored: Mounted) -> None:
    variables = {
        "LMCACHE_LOCAL_DISK": f"file://{doctored.path}/lmcache",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "100000",
    }
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, env={**os.environ, **variables}
    ) as connector:
        done = run_kvfs("doctor", str(doctored.path), check=False)
        assert connector.stdin is not None
        connector.stdin.close()
    assert done.returncode == SeriousFindings.exit_code
    assert f"process {connector.pid} (cat)" in " ".join(done.stdout.split())
    assert "export LMCACHE_MAX_LOCAL_DISK_SIZE=" in done.stdout
    assert done.stderr.splitlines() == [f"kvfs: serious findings at {doctored.path}"]


@pytest.mark.needs_fuse
def test_two_connectors_with_equal_limits_count_twice_and_workers_not(doctored: Mounted) -> None:
    """Their launcher has the limit, too, and keeps nothing; a worker has it from its connector."""
    variables = {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": f"{doctored.path}/sglang",
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": "600Mi",
    }
    connector = (
        "import subprocess, sys; w = subprocess.Popen(['cat']); print(1, flush=True); w.wait()"
    )
    shell = shlex.join([sys.executable, "-c", connector])
    with subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; {shell} <&3 & {shell} <&3 & wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdin is not None
        assert [launcher.stdout.readline() for _ in range(2)] == [b"1\n"] * 2
        limits = gather(str(doctored.path)).limits_of_connectors
        done = run_kvfs("doctor", str(doctored.path), "--json", check=False)
        launcher.stdin.close()
    assert [limit.limit_bytes for limit in limits] == [600 * MIB] * 2
    (finding,) = [
        one for one in json.loads(done.stdout)["findings"] if one["check"] == "connector limits"
    ]
    assert "1.17 GiB together" in finding["problem"]


@pytest.mark.needs_fuse
def test_doctor_finds_habits_in_command_lines(doctored: Mounted) -> None:
    """A vLLM that fails requests, and one whose blocks are those of an LMCache server here."""
    adapter = json.dumps({"type": "fs", "base_path": f"{doctored.path}/lmcache"})
    tier = {"secondary_tiers": [{"type": "fs", "root_dir": f"{doctored.path}/vllm"}]}
    vllm = [
        json.dumps({"kv_connector": name, "kv_connector_extra_config": extra})
        for name, extra in (("OffloadingConnector", tier), ("LMCacheMPConnector", {}))
    ]
    with contextlib.ExitStack() as stack:
        for words in (
            ("vllm", "serve", "--kv-transfer-config", vllm[0]),
            ("vllm", "serve", "--kv-transfer-config", vllm[1]),
            ("lmcache", "server", "--l2-adapter", adapter),
        ):
            process = subprocess.Popen(
                [sys.executable, "-c", "print(input())", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            stack.callback(process.communicate, b"end\n")
        done = run_kvfs("doctor", str(doctored.path), "--json", check=False)
    assert done.returncode == SeriousFindings.exit_code
    found = json.loads(done.stdout)["findings"]
    fixes = [one["fix"] for one in found if one["check"] == "load failures"]
    assert len(fixes) == 2
    assert all('"kv_load_failure_policy": "recompute"' in fix for fix in fixes)


@pytest.mark.needs_fuse
def test_doctor_takes_limits_and_settings(doctored: Mounted, tmp_path: Path) -> None:
    settings = tmp_path / "lmcache.yaml"
    settings.write_text(f"local_disk: file://{doctored.path}\nmax_local_disk_size: 99999\n")
    flags = ("--connector-limit", "100T", "--connector-config", str(settings))
    done = run_kvfs("doctor", str(doctored.path), "--json", *flags, check=False)
    assert done.returncode == SeriousFindings.exit_code
    found = [one for one in json.loads(done.stdout)["findings"] if one["severity"] == "serious"]
    assert [one["check"] for one in found] == ["connector limits"] * 2
    # The command does what it says.
    (by_file,) = [one["fix"].splitlines()[0] for one in found if "sed" in one["fix"]]
    subprocess.run(["sh", "-c", by_file], check=True)
    done = run_kvfs("doctor", str(doctored.path), "--connector-config", str(settings), check=False)
    assert done.returncode == 0


#: What exportfs (nfs-utils 2.6.2) made of `exportfs -i -o rw,async,no_subtree_check HOST:PATH`, and
#: of the command that doctor then gives. No kernel here has an NFS server, nor a client.
EXPORTED = (
    "{path}\t127.0.0.1(rw,async,wdelay,hide,nocrossmnt,secure,no_root_squash,no_all_squash,"
    "no_subtree_check,secure_locks,acl,no_pnfs,{fsid}anonuid=65534,anongid=65534,sec=sys,rw,"
    "no_root_squash,no_all_squash)\n"
)


@pytest.mark.needs_fuse
@pytest.mark.parametrize(("fsid", "found"), [("", ["serious"]), ("fsid=4711,", [])])
def test_doctor_reads_the_table_of_exports(
    doctored: Mounted, tmp_path: Path, fsid: str, found: list[str]
) -> None:
    """In a mount namespace with a table of its own: the file is the machine's."""
    table = tmp_path / "etab"
    table.write_text(EXPORTED.format(path=doctored.path, fsid=fsid))
    script = 'mount -t tmpfs none /var/lib && mkdir /var/lib/nfs && cp "$1" /var/lib/nfs && exec '
    script += f"{shlex.join(KVFS)} doctor --json {doctored.path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(table)],
        capture_output=True,
        text=True,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    of_exports = [one for one in findings if one["check"] == "NFS exports"]
    assert [one["severity"] for one in of_exports] == found
    for one in of_exports:
        assert one["fix"] == (
            f"exportfs -o rw,async,no_subtree_check,mp,no_root_squash,"
            f"fsid={doctored.status()['uuid']} 127.0.0.1:{doctored.path}"
        )


@pytest.mark.needs_fuse
def test_doctor_looks_at_all_mounts(doctored: Mounted) -> None:
    done = run_kvfs("doctor", "--json", check=False)
    assert str(doctored.path) in [report["mountpoint"] for report in json.loads(done.stdout)]


@pytest.mark.needs_fuse
def test_doctor_without_a_mount_tells_of_servers_that_do_not_answer(
    doctored: Mounted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, gone = socket_path(name_of(str(doctored.path))), "/run/kvfs/gone.sock"
    # Another test beside this one may have a dead mount just now.
    ours = [mount for mount in mounts() if mount.mountpoint == str(doctored.path)]
    for path, error, exit_code, said in (
        (here, ServerGone("x"), SeriousFindings.exit_code, "the next one does not serve yet"),
        (here, ServeFailed("no answer"), SeriousFindings.exit_code, "calls hang: no answer"),
        (here, NotRoot("for root"), NotRoot.exit_code, "kvfs: for root"),
        (gone, ServerGone(f"{gone} is stale"), NotMounted.exit_code, f"`rm {gone}` removes it"),
    ):
        # A socket of no mount: if one were there without a server, it might be that one's.
        there = ours if path == here else []
        monkeypatch.setattr("kvfs.client.servers.mounts", lambda there=there: there)
        found = [ServerAnswer(path, {}, error)]
        monkeypatch.setattr("kvfs.client.servers.answers", lambda found=found: found)
        assert main(["doctor"]) == exit_code
        captured = capsys.readouterr()
        assert said in " ".join((captured.out + captured.err).split())  # a table wraps at words
    detached = [ServerAnswer(gone, {"mountpoint": "/nowhere"}, None)]
    monkeypatch.setattr("kvfs.client.servers.answers", lambda _first="": detached)
    assert main(["doctor"]) == NotMounted.exit_code
    assert capsys.readouterr().err == "kvfs: no kvfs is mounted at /nowhere\n"


@pytest.mark.needs_fuse
def test_doctor_of_a_server_that_is_stopped_or_dead_has_a_finding() -> None:
    """By the mount's name, too; the command below the finding ends it."""
    skip_without_mounts()
    with workplace() as place:
        (place / "pool").mkdir()
        with Mounted(place / "pool", place / "kv", "--capacity", "256M") as mount:
            (mount.path / "block").write_bytes(b"kept")
            os.rename(mount.path / "block", mount.path / "final")
            stop = functools.partial(os.kill, mount.server_pid, signal.SIGSTOP)
            for do, said in ((stop, "is stopped"), (mount.kill, "is dead")):
                do()
                for command in ((str(mount.path), "--json"), (f"{mount.path}/", "--json")):
                    done = run_kvfs("doctor", *command, check=False)
                    assert done.returncode == SeriousFindings.exit_code
                    (finding,) = json.loads(done.stdout)["findings"]
                    assert (finding["check"], finding["severity"]) == ("server", "serious")
                    assert said in finding["problem"]
                run_fix(finding["fix"])
                assert (mount.path / "final").read_bytes() == b"kept"
            mount.adopt()


def run_fix(fix: str) -> None:
    """Run what doctor shows as one would who copies it."""
    programs = Path(sys.executable).parent
    path = f"{programs}:{os.environ['PATH']}"
    command = fix.splitlines()[0]
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PATH": path}, timeout=90, check=False
    )
    assert done.returncode == 0, command


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("/",), NotMounted),
        (("{kv}", "--connector-limit", "much"), UsageError),
        (("{kv}", "--connector-config", "/nonexistent"), UsageError),
    ],
)
def test_doctor_refuses(
    doctored: Mounted, flags: tuple[str, ...], error: type[NotMounted | UsageError]
) -> None:
    arguments = [flag.format(kv=doctored.path) for flag in flags]
    done = run_kvfs("doctor", *arguments, check=False)
    assert done.returncode == error.exit_code
    assert len(done.stderr.splitlines()) == 1


def test_help_shows_an_example() -> None:
    shown = run_kvfs("doctor", "--help").stdout
    assert "kvfs doctor /kv" in shown
    assert "exit code 19" in shown


def test_what_an_xfs_says_of_itself(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(320 * MIB)
    assert xfs_on(str(image)) is None
    subprocess.run(
        ["mkfs.xfs", "-q", "-i", "size=2048", "-m", "reflink=1,rmapbt=0", str(image)], check=True
    )
    made = xfs_on(str(image))
    assert made is not None
    assert (made.inode_bytes, made.has_reflink, made.has_rmapbt) == (2048, True, False)
    assert made.size_bytes == 320 * MIB
    assert 4 * MIB <= made.log_bytes < 320 * MIB


def test_drives_of_a_partition_of_a_mirror(tmp_path: Path) -> None:
    """md0p1 on two drives' partitions: read-ahead is the mirror's, everything else the drives'."""
    write_tree(
        tmp_path,
        {
            "devices/md0/queue/read_ahead_kb": "512\n",
            "devices/md0/md0p1/partition": "1\n",
            "devices/a/queue/scheduler": "none [mq-deadline] bfq\n",
            "devices/a/queue/rotational": "1\n",
            "devices/a/device/device/numa_node": "1\n",
            "devices/a/a1/partition": "1\n",
            "devices/b/queue/scheduler": "none\n",
            "devices/b/device/numa_node": "0\n",
            "devices/b/b1/partition": "1\n",
            "devices/md0/slaves/a1": "",
            "devices/md0/slaves/b1": "",
        },
    )
    for directory in ("block", "class/block", "dev/block"):
        (tmp_path / directory).mkdir(parents=True)
    for name in ("md0", "a", "b"):
        (tmp_path / "block" / name).symlink_to(tmp_path / "devices" / name)
    for name in ("a/a1", "b/b1"):
        (tmp_path / "class/block" / name[2:]).symlink_to(tmp_path / "devices" / name)
    (tmp_path / "dev/block/9:1").symlink_to(tmp_path / "devices/md0/md0p1")
    drives = Drives(str(tmp_path))
    assert drives.under(os.makedev(9, 1)) == (
        Disk("a", "mq-deadline", True, 1),
        Disk("b", "", False, 0),
    )
    assert drives.read_ahead(os.makedev(9, 1)) == ReadAheadSetting(
        512 << 10, "/sys/block/md0/queue/read_ahead_kb"
    )
    assert drives.under(os.makedev(0, 44)) == ()


@pytest.mark.parametrize(("text", "cpus"), [("0-2,8\n", {0, 1, 2, 8}), ("\n", set()), ("5", {5})])
def test_ranges_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_ranges(text) == cpus
