"""mount, umount, status, SIGTERM and SIGHUP as an operator meets them."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import __version__
from kvfs.cli import mount_background, umount
from kvfs.cli.main import main
from kvfs.client import servers, subprocesses
from kvfs.client.control_socket import ask
from kvfs.core import errors
from kvfs.core.errors import UsageError
from kvfs.core.mount_name import name_of, socket_path
from kvfs.core.settings import Settings
from kvfs.machine import mount_table
from tests.support.clients.stepping import until
from tests.support.mounts.copies import copy_of_all_mounts, detach_copies
from tests.support.mounts.mounting import COMMAND_WAIT_S, KVFS, ROOT, run_kvfs
from tests.support.mounts.places import CAPACITY_BYTES, blank_place, lines_of, small_mount
from tests.support.mounts.unsupervised import in_the_servers_place

pytestmark = pytest.mark.needs_fuse


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def test_a_mount_says_all_about_itself(place: Path) -> None:
    with small_mount(place) as mount:
        status = mount.status()
        assert status["version"] == __version__
        assert status["mountpoint"] == str(place / "kv")
        assert status["source"] == str(place / "pool")
        assert status["data_path"] in ("daemon", "passthrough")
        assert status["data_path_reason"]
        assert status["capacity_bytes"] == CAPACITY_BYTES
        assert status["used_bytes"] == 0
        assert status["blocks"] == 0
        assert isinstance(status["errors"], dict)
        (mount.path / "block").write_bytes(b"x" * 8192)
        status = mount.status()
        assert status["blocks"] == 1
        assert status["used_bytes"] >= 8192
        assert status["requests"]["CREATE"] == 1
        os.kill(status["server_pid"], 0)


def test_status_for_a_reader_and_for_all_mounts(place: Path) -> None:
    with small_mount(place) as mount:
        shown = run_kvfs("status", str(mount.path)).stdout
        assert shown.splitlines()[0].strip() == str(mount.path)
        assert re.search(rf"^source +{place / 'pool'}$", shown, re.MULTILINE)
        assert re.search(r"^capacity +256 MiB$", shown, re.MULTILINE)
        assert re.search(r"^Trouble\nnone$", shown, re.MULTILINE)
        assert "More" not in shown  # every figure has its name for a reader
        everything = json.loads(run_kvfs("status", "--json", check=False).stdout)
        assert str(mount.path) in [status["mountpoint"] for status in everything]


def test_the_command_returns_when_it_serves_and_leaves_no_terminal_held(place: Path) -> None:
    # Pipes, unlike the files of run_kvfs, stay open as long as anybody has them.
    done = subprocess.run(
        [*KVFS, "mount", str(place / "pool"), str(place / "kv"), f"--log-file={place / 'log'}"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    try:
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert os.path.ismount(place / "kv")
        status = ask(socket_path(name_of(str(place / "kv"))), "status")
        for pid in (status["server_pid"], status["supervisor_pid"]):
            for fd in (0, 1, 2):
                assert os.readlink(f"/proc/{pid}/fd/{fd}") == os.devnull
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
            assert os.getsid(pid) == status["supervisor_pid"]
    finally:
        run_kvfs("umount", str(place / "kv"), check=False)


def test_after_umount_everything_is_free_at_once(place: Path) -> None:
    with small_mount(place) as mount:
        (mount.path / "block").write_bytes(b"kept")
        path = socket_path(name_of(str(mount.path)))
        assert os.path.exists(path)
        mount.stop()
        assert not os.path.exists(path)
        assert not os.path.ismount(mount.path)
        run_kvfs("mount", str(place / "pool"), str(place / "kv"), f"--log-file={place / 'log'}")
        assert (mount.path / "block").read_bytes() == b"kept"
        run_kvfs("umount", str(place / "kv"))
        run_kvfs("destroy", str(place / "pool"), "--yes")
        assert list((place / "pool").iterdir()) == []


def test_a_busy_mount_is_named_with_who_keeps_it_busy(place: Path) -> None:
    with small_mount(place) as mount:
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=mount.path)
        try:
            result = run_kvfs("umount", str(mount.path), check=False)
            assert result.returncode == errors.MountpointUnusable.exit_code
            busy, _, step = result.stderr.partition("; end what uses it, or ")
            assert busy == f"kvfs: {mount.path} is busy: used by {holder.pid} (cat)"
            assert step == f"`kvfs umount --lazy {mount.path}` detaches it now\n"
            assert mount.status()["server_pid"] == mount.server_pid
        finally:
            holder.communicate()


def test_umount_does_not_name_itself_nor_keep_busy_what_it_unmounts(place: Path) -> None:
    with small_mount(place) as mount:
        inside = f"env --chdir={mount.path} PYTHONPATH={ROOT}".split()
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=mount.path)
        try:
            result = run_kvfs("umount", ".", check=False, prefix=inside)
            assert f": used by {holder.pid} (cat); end" in result.stderr
        finally:
            holder.communicate()
        run_kvfs("umount", ".", prefix=inside)
        assert not os.path.ismount(mount.path)
        mount._wait_for_server()


def test_a_lazy_umount_detaches_what_is_in_use(place: Path) -> None:
    with small_mount(place) as mount:
        with (mount.path / "block").open("wb", buffering=0) as file:
            result = run_kvfs("umount", "--lazy", str(mount.path))
            assert result.stderr.startswith(f"kvfs: server {mount.server_pid} runs until")
            assert not os.path.ismount(mount.path)
            file.write(b"still served")
        mount._wait_for_server()


def test_of_two_umounts_the_later_finds_nothing_mounted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def later(mountpoint: str, *, lazy: bool) -> None:
        mount_table.unmount(mountpoint, lazy=False)
        mount_table.unmount(mountpoint, lazy=lazy)

    monkeypatch.setattr(umount, "unmount", later)
    with small_mount(place) as mount:
        assert main(["umount", str(mount.path)]) == errors.NotMounted.exit_code
        assert capsys.readouterr().err == f"kvfs: nothing is mounted at {mount.path} any more\n"
        mount._wait_for_server()


def test_a_dead_server_is_named_and_its_mount_cleared(place: Path) -> None:
    with small_mount(place) as mount:
        (mount.path / "draft").write_bytes(b"kept")
        # The rename publishes, and has done so when it returns; a close is told to nobody.
        (mount.path / "draft").rename(mount.path / "block")
        mount.kill()
        result = run_kvfs("status", str(mount.path), check=False)
        assert result.returncode == errors.NotMounted.exit_code
        assert f"the server of {mount.path} is dead" in result.stderr
        result = run_kvfs("status", check=False)
        assert f"the server of {mount.path} is dead; `kvfs umount {mount.path}`" in result.stderr
        # As any umount of another kvfs does: the mount table tells of it all the same.
        Path(socket_path(name_of(str(mount.path)))).unlink(missing_ok=True)
        result = run_kvfs("status", check=False)
        assert f"the server of {mount.path} is dead; `kvfs umount {mount.path}`" in result.stderr
        result = run_kvfs("status", str(mount.path), check=False)
        assert f"the server of {mount.path} is dead" in result.stderr
        result = run_kvfs("doctor", check=False)
        assert result.returncode == errors.SeriousFindings.exit_code
        again = f"kvfs umount {mount.path} && kvfs mount {mount.source} {mount.path}\n"
        assert again in result.stdout
        run_kvfs("umount", str(mount.path))
        assert not os.path.ismount(mount.path)
        assert not os.path.exists(socket_path(name_of(str(mount.path))))
        mount.start()
        assert (mount.path / "block").read_bytes() == b"kept"


def test_only_what_the_kernel_says_is_dead_is_called_dead(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second place of a mount has no server by its name, nor has one that is named otherwise."""
    monkeypatch.setattr(servers, "_ANSWER_WAIT_S", 0.2)
    monkeypatch.setattr(subprocesses, "LOOK_MAX_S", 1.0)
    again = place / "again"
    again.mkdir()
    with small_mount(place, f"--name=kvfs-test-other-{os.getpid()}") as mount:
        subprocess.run(["mount", "--bind", mount.path, again], check=True)
        try:
            assert main(["status", str(again)]) == errors.ServeFailed.exit_code
            assert f"no response from the server of {again}" in capsys.readouterr().err
            main(["status"])
            assert str(again) not in capsys.readouterr().err
        finally:
            subprocess.run(["umount", again], check=True)
        os.kill(mount.server_pid, signal.SIGSTOP)
        try:
            assert main(["status", str(mount.path)]) == errors.ServeFailed.exit_code
            assert "no response from the server of" in capsys.readouterr().err
            main(["status"])
            everything = capsys.readouterr().err
            assert f"kvfs-test-other-{os.getpid()}.sock: no answer within" in everything
            assert f"the server of {mount.path} is dead" not in everything
        finally:
            os.kill(mount.server_pid, signal.SIGCONT)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "copied"])
def test_a_server_that_hangs_is_named_and_its_mount_can_go(place: Path, *, beside: bool) -> None:
    """Also if another mount namespace has a copy of the mount, as a container or a test may."""
    with small_mount(place) as mount, copy_of_all_mounts() if beside else contextlib.nullcontext():
        os.kill(mount.server_pid, signal.SIGSTOP)
        try:
            result = run_kvfs("status", str(mount.path), check=False)
            assert result.returncode == errors.ServeFailed.exit_code
            assert "no answer within" in result.stderr
            (place / "link").symlink_to(mount.path)
            result = run_kvfs("evict", str(place / "link" / "never-seen"), check=False)
            assert result.returncode == errors.ServeFailed.exit_code
            assert "no answer within" in result.stderr
            (place / "kv.toml").write_text(f'mountpoint = "{mount.path}"\nstop_timeout_s = 1\n')
            result = run_kvfs("umount", f"--config={place}/kv.toml", check=False)
            assert result.returncode == errors.ServeFailed.exit_code
            copied = f"is unmounted here, but server {mount.server_pid} runs on"
            alone = f"is unmounted, but server {mount.server_pid} still runs after 1 s"
            assert copied in result.stderr or (not beside and alone in result.stderr)
            assert not os.path.ismount(mount.path)
        finally:
            os.kill(mount.server_pid, signal.SIGCONT)
        detach_copies(mount.path)
        mount._wait_for_server()


def test_a_start_that_hangs_leaves_neither_server_nor_mount(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from mount.fuse import kernel\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"kernel.mount(kernel.open_device(), {str(place / 'kv')!r}, 'never', read_only=False)\n"
        f"open({str(place / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "signal.pause()\n"
    )
    supervised = functools.partial(in_the_servers_place, program)
    monkeypatch.setattr(mount_background, "supervised", supervised)
    monkeypatch.setattr(mount_background, "_GRACE_S", 0.2)
    settings = Settings(source="/none", mountpoint=str(place / "kv"), start_timeout_s=5)
    with pytest.raises(errors.ServeFailed, match="was not ready after 5 s"):
        mount_background.start_in_background(settings, ["mount"])
    pid = (place / "pid").read_text()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "its new parent takes it in")
    assert not os.path.ismount(place / "kv")
    assert mount_table.mount_at(str(place / "kv")) is None


def test_a_server_with_a_name_of_its_own_is_found_by_its_mountpoint(place: Path) -> None:
    name = f"kvfs-test-{os.getpid()}"
    with small_mount(place, "--name", name) as mount:
        assert os.path.exists(socket_path(name))
        assert mount.status()["name"] == name


def test_the_root_directory_gets_owner_and_mode_and_keeps_them(place: Path) -> None:
    with small_mount(place, "-o", "uid=1234,gid=2345", "-o", "mode=0750") as mount:
        mount.stop()
        mount.flags = ()
        mount.start()
        found = mount.path.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (1234, 2345, 0o750)


def test_a_read_only_mount_takes_nothing(place: Path) -> None:
    with small_mount(place) as mount:
        (mount.path / "block").write_bytes(b"kept")
        mount.remount("-o", "ro")
        assert (mount.path / "block").read_bytes() == b"kept"
        assert mount.status()["read_only"] is True
        with pytest.raises(OSError, match="Read-only file system"):
            (mount.path / "other").touch()
        mount.stop()
        refused = run_kvfs("mount", mount.source, str(mount.path), "-o", "ro,uid=1000", check=False)
        assert refused.returncode == UsageError.exit_code
        (line,) = refused.stderr.splitlines()
        assert "a read-only mount keeps the root's owner and mode" in line
        uid = os.getuid()
        mount.flags = ("-o", f"ro,uid={uid}")  # as it is
        mount.start()


def test_settings_from_a_file_and_flags_over_them(place: Path) -> None:
    config = place / "kv.toml"
    config.write_text(
        f'source = "{place / "pool"}"\nmountpoint = "{place / "kv"}"\n'
        f'capacity_bytes = "128M"\nmode = "0700"\nlog_file = "{place / "log"}"\n'
    )
    try:
        run_kvfs("mount", "--config", str(config), "--capacity", "100M")
        status = json.loads(run_kvfs("status", str(place / "kv"), "--json").stdout)
        assert status["capacity_bytes"] == 100 << 20
        assert (place / "kv").stat().st_mode & 0o7777 == 0o700
    finally:
        run_kvfs("umount", "--config", str(config), check=False)


def test_a_mount_needs_no_standard_streams(place: Path) -> None:
    arguments = [str(place / "pool"), str(place / "kv"), f"--log-file={place / 'log'}"]
    command = [*KVFS, "mount", *arguments]
    try:
        shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
        assert subprocess.run(shell, cwd=ROOT, check=False).returncode == 0
        (place / "kv" / "block").write_bytes(b"served")
        assert (place / "kv" / "block").read_bytes() == b"served"
    finally:
        run_kvfs("umount", str(place / "kv"), check=False)


def test_a_capacity_below_what_the_pool_holds_is_said(place: Path) -> None:
    with small_mount(place) as mount:
        for number in range(10):
            (mount.path / f"{number}").write_bytes(bytes(10 << 20))
        flags = ("--log-file", str(mount.log_file), "--capacity")
        arguments = ("mount", mount.source, str(mount.path), *flags)
        mount.stop()
        done = run_kvfs(*arguments, "1000K", check=False)
        assert done.returncode == errors.UsageError.exit_code
        assert done.stderr == "kvfs: command line: capacity_bytes: 1024000 is below 1 MiB\n"
        done = run_kvfs(*arguments, "64M")
        said = "evicting 36 MiB of 100 MiB: the capacity is below what the pool holds"
        assert done.stderr == f"kvfs: {said}\n"
        assert lines_of(mount.log_file, said)
        run_kvfs("umount", str(mount.path))
        mount.start()


def test_sighup_takes_over_what_may_change_and_names_the_rest(place: Path) -> None:
    config, log = place / "kv.toml", place / "kv.log"
    text = f'source = "{place / "pool"}"\nmountpoint = "{place / "kv"}"\nlog_file = "{log}"\n'
    config.write_text(text)
    server = socket_path(name_of(str(place / "kv")))
    try:
        run_kvfs("mount", "--config", str(config))
        pid = ask(server, "status")["server_pid"]
        for changed, said in (
            ('log_level = "debug"\nio_threads = 3\n', "need a remount: ['io_threads']"),
            ("log_level = 3\n", "settings not reloaded: "),
            ("", "settings reloaded"),
        ):
            before = len(lines_of(log, "reloaded"))
            config.write_text(text + changed)
            os.kill(pid, signal.SIGHUP)
            # Each answer is one more turn of the server's loop, which also serves its signals.

            def answered(before: int = before) -> bool:
                ask(server, "status")
                return len(lines_of(log, "reloaded")) > before

            until(answered, "the server reloads")
            assert said in lines_of(log, "reloaded")[-1]
    finally:
        run_kvfs("umount", str(place / "kv"), check=False)


def test_in_the_foreground_it_ends_with_the_mount(place: Path) -> None:
    reading, writing = os.pipe()
    server = subprocess.Popen(
        [*KVFS, "mount", "--foreground", str(place / "pool"), str(place / "kv")],
        cwd=ROOT,
        stderr=writing,
    )
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as log:
            assert any("serving" in line for line in log)
            assert os.path.ismount(place / "kv")
            run_kvfs("umount", str(place / "kv"))
            assert server.wait(COMMAND_WAIT_S) == 0
            assert "is unmounted" in log.read()
    finally:
        server.kill()
        server.wait()


def test_from_a_foreign_directory_nothing_foreign_is_imported(place: Path) -> None:
    trap = place / "trap"
    trap.mkdir()
    (trap / "trio.py").write_text("raise SystemExit('a trap')")
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from kvfs.cli.main import main; "
    command = [sys.executable, "-P", "-c", program + "sys.exit(main())"]
    try:
        done = subprocess.run(
            [*command, str(ROOT), "mount", "../pool", "../kv", "--log-file=../log"],
            cwd=trap,
            check=False,
        )
        assert done.returncode == 0
        assert os.path.ismount(place / "kv")
    finally:
        run_kvfs("umount", str(place / "kv"), check=False)
