"""``kvfs status``: a line a mount unless more is asked for, and a group that may ask for it."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvfs.cli.status import list_of
from kvfs.cli.status_table import tables
from kvfs.client.control_socket import ask
from kvfs.core.errors import NotRoot, UsageError
from kvfs.core.mount_name import name_of, socket_path
from mount.control.socket import CONNECTIONS_MAX
from tests.support.mounts.mounting import ROOT, Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

GROUP = 54321
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
MEMBERS = (
    ("setpriv", "--reuid=65534", f"--regid={GROUP}", "--clear-groups"),
    ("setpriv", "--reuid=65534", "--regid=65534", f"--groups=7,{GROUP}"),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Mounted]:
    """A mount whose group may ask."""
    skip_without_mounts()
    with blank_place() as place, small_mount(place, "--set", f"control_group={GROUP}") as mounted:
        (mounted.path / "a.tmp").write_bytes(bytes(1 << 20))
        (mounted.path / "a.tmp").rename(mounted.path / "a")
        (mounted.path / "a").read_bytes()
        yield mounted
        mounted.stop()
        assert mounted.errors() == []


def test_a_line_a_mount_and_all_of_it_when_asked(pool: Mounted) -> None:
    lines = run_kvfs("status").stdout.splitlines()
    (line,) = [line for line in lines if line.split()[0] == str(pool.path)]
    assert lines[0].split()[:4] == ["MOUNT", "USED", "OF", "EVICTABLE"]
    assert line.split()[1:3] == ["1", "MiB"]
    assert line.split()[-1] == "ok"
    assert "%" in line
    assert "lease limit (lease_max)" in run_kvfs("status", "--all").stdout
    assert "lease limit (lease_max)" in run_kvfs("status", str(pool.path)).stdout


def test_the_tables_make_do_with_an_older_server(pool: Mounted) -> None:
    told = pool.status()
    cache = {name: told["cache"][name] for name in ("hits", "misses", "hit_rate", "uptime_s")}
    cache |= {name: told["cache"][name] for name in ("loaded_bytes", "directories", "models")}
    cache |= {name: told["cache"][name] for name in ("evicted", "stored_blocks", "stored_bytes")}
    assert [list(lines) for lines in tables({"mountpoint": "/kv", "cache": cache}, 80)]


def test_the_list_tells_what_is_wrong() -> None:
    """And makes do with what an older server, or one without its device, says."""
    lines = list_of(
        [
            {"mountpoint": "/a", "device_lost": "gone", "data_path": "none"},
            {"mountpoint": "/b", "lost_blocks": 1, "warning": "little"},
            {"mountpoint": "/c", "warning": "little", "cache": {"hit_rate": None}},
            {"mountpoint": "/d", "read_only": True, "cache": {"hit_rate": 0.6512}},
        ],
        80,
    )
    rows = [re.split("  +", line) for line in lines]
    assert [row[7] for row in rows] == [
        *("HEALTH", "device lost", "see kvfs doctor", "little evictable", "read only")
    ]
    assert [row[5] for row in rows] == ["HIT RATE", "-", "-", "-", "65.1 %"]


def test_a_long_mountpoint_takes_several_lines_before_a_figure_is_cut_off() -> None:
    long = "/" + "kv" * 60
    status = {"mountpoint": long, "used_bytes": 1 << 30, "blocks": 12_000}
    lines = list(list_of([status, {"mountpoint": "/kv", "blocks": 7}], 100))
    assert max(len(line) for line in lines) <= 100
    assert " 1 GiB " in lines[1]
    assert " 12,000 " in lines[1]
    assert "".join([lines[1].split()[0], *lines[2:-1]]) == long
    assert lines[1].index("00 ") + 1 == lines[-1].index("7 "), "figures are aligned on the right"


def test_no_status_needs_a_slow_import(pool: Mounted) -> None:
    """Nor does the help; the limit of 80 ms of CPU is for a machine that is idle."""
    program = (
        "import atexit, sys; from kvfs.cli.main import main\n"
        "atexit.register(lambda: print(*sys.modules, sep='\\n')); main(sys.argv[1:])"
    )
    for words in (("status",), ("status", str(pool.path)), ("--help",)):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        packages = {name.split(".")[0] for name in done.stdout.splitlines()}
        assert "kvfs" in packages
        assert not packages & {"rich", "numpy", "prometheus_client", "trio", "pyfuse3", "lmdb"}
    assert str(pool.path) in run_kvfs("status", check=False).stdout


@pytest.mark.parametrize("member", MEMBERS, ids=["first group", "other group"])
def test_the_group_may_ask_and_no_more(pool: Mounted, member: tuple[str, ...]) -> None:
    told = json.loads(run_kvfs("status", str(pool.path), "--json", prefix=member).stdout)
    assert told["server_pid"] == pool.server_pid
    for verb in ("evict", "pin", "unpin"):
        done = run_kvfs(verb, str(pool.path), prefix=member, check=False)
        assert done.returncode == NotRoot.exit_code
        assert "is for root; the group of control_group may ask for the status" in done.stderr
    assert (pool.path / "a").exists()


def test_nobody_else_may_ask(pool: Mounted) -> None:
    path = socket_path(name_of(str(pool.path)))
    found = os.stat(path)
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, GROUP)
    done = run_kvfs("status", str(pool.path), prefix=NOBODY, check=False)
    assert done.returncode == NotRoot.exit_code
    # Whoever gets the socket in another way is told apart by who he is.
    os.chmod(path, 0o666)
    try:
        done = run_kvfs("status", str(pool.path), prefix=NOBODY, check=False)
    finally:
        os.chmod(path, 0o660)
    assert (done.returncode, "the control socket is for root" in done.stderr) == (3, True)


def test_the_group_does_not_keep_root_away(pool: Mounted) -> None:
    """As many connections as there may be, all held by a member."""
    path = socket_path(name_of(str(pool.path)))
    program = (
        "import socket, sys\n"
        f"held = [socket.socket(socket.AF_UNIX) for _ in range({2 * CONNECTIONS_MAX})]\n"
        f"for one in held: one.connect({path!r})\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [*MEMBERS[0], sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        assert ask(path, "status")["server_pid"] == pool.server_pid
        holder.stdin.close()


def test_a_group_that_is_none_is_told_before_anything_is_touched() -> None:
    skip_without_mounts()
    with blank_place() as place:
        flags = ("--set", "control_group=no-such-group")
        done = run_kvfs("mount", str(place / "pool"), str(place / "kv"), *flags, check=False)
        assert done.returncode == UsageError.exit_code
        assert "control_group: there is no group 'no-such-group' on this machine" in done.stderr
        assert list((place / "pool").iterdir()) == []
