"""The command line itself: one line and an exit code for whatever goes wrong, no server needed."""

import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kvfs import __version__
from kvfs.cli import mkfs, mount_background
from kvfs.cli.failures import INTERNAL_ERROR_EXIT, INTERRUPTED_EXIT, explain
from kvfs.cli.main import VERBS, main
from kvfs.cli.mount_background import ReadyPipe, StartFailed, start_in_background, wait_for_outcome
from kvfs.core import errors
from kvfs.core.errors import (
    CommandError,
    Damaged,
    MountpointUnusable,
    NotRoot,
    PathMissing,
    ServeFailed,
    ToolMissing,
    UsageError,
)
from kvfs.core.settings import Settings
from tests.support.mounts.mounting import ROOT, run_kvfs
from tests.support.mounts.unsupervised import in_the_servers_place

NOBODY = 65534
KVFS = (sys.executable, "-m", "kvfs.cli.main")
#: What a program costs that only asks a server, or only says its version.
HEAVY_MODULES = ("trio", "pyfuse3", "numpy", "lmdb", "rich")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def failed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command in this process and return its exit code and its one line."""
    exit_code = main(arguments)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("kvfs: ")
    assert "Traceback" not in captured.out
    return exit_code, lines[0].removeprefix("kvfs: ")


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"kvfs {__version__}\n"


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for verb, summary in VERBS.items():
        assert verb in shown
        assert summary.split(",")[0] in " ".join(shown.split())


@pytest.mark.parametrize("verb", ["", "evict", "bench compare"])
def test_help_is_a_verb_too(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And for kvfs alone it is not even needed."""
    said = []
    for command in (["help", *verb.split()], [*verb.split(), *(["--help"] if verb else [])]):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "example:\n  kvfs" in said[0]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert f"example:\n  kvfs {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("frob",), "invalid choice: 'frob'"),
        (("statsu",), "invalid choice: 'statsu'; did you mean 'status'? (see `kvfs --help`)"),
        (("bench", "jbos"), "'jbos'; did you mean 'jobs'? (see `kvfs bench --help`)"),
        (("mount", "--frob", "/a", "/b"), "unknown flag --frob (see `kvfs mount --help`)"),
        (("mount", "--foregr", "/a"), "unknown flag --foregr; did you mean '--foreground'?"),
        (("evict", "--dryrun"), "unknown flag --dryrun; did you mean '--dry-run'?"),
        (("bench", "compare", "--job=x"), "unknown flag --job; did you mean '--jobs'?"),
        (("mkfs",), "the following arguments are required: SOURCE (see `kvfs mkfs --help`)"),
        (("mkfs", "/a", "--capacity", "many"), "--capacity: 'many' is not a size"),
        (("mkfs", "/a", "--capacity", "0"), "--capacity must be greater than 0"),
        *(
            (
                ("umount", "/a", "--wait-s", wrong),
                "argument --wait-s: must be between 0 and 3600 seconds",
            )
            for wrong in ("x", "nan", "inf", "1e300", "-1")
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, line = failed(*arguments, capsys=capsys)
    assert exit_code == UsageError.exit_code
    assert said in line


@needs_root
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("/a",), "give SOURCE and MOUNTPOINT"),
        (("/a", "/b", "-o", "suid"), "-o suid: use uid=, gid=, mode=, ro or rw"),
        (("/a", "/b", "-o", "uid=x"), "command line: uid: 'x' is not a number"),
        (("/a", "/b", "--set", "ready_share"), "write --set NAME=VALUE"),
        (("/a", "/b", "--set", "redy_share=0"), "did you mean 'ready_share'?"),
        (("/a", "/b", "--fsync", "never"), "fsync: 'never' is not one of relaxed, honour"),
        (
            ("/a", "/b", "--data-path", "x"),
            "data_path: 'x' is not one of auto, passthrough, daemon",
        ),
        (("/a", "/b", "--capacity", "12Q"), "capacity_bytes: '12Q' is not a size"),
        (("/a", "/b", "--name", "../x"), "name '../x'"),
        (("--config", "/none/kv.toml"), "settings file /none/kv.toml does not exist"),
    ],
)
def test_a_wrong_setting_of_a_mount_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, line = failed("mount", *arguments, capsys=capsys)
    assert exit_code == UsageError.exit_code
    assert said in line


@needs_root
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('source = "pool"\nmountpoint = "/kv"', "source: 'pool' is not an absolute path"),
        ('sauce = "/pool"', "unknown setting 'sauce'; did you mean 'source'?"),
        ("source", "kv.toml: Expected '='"),
    ],
)
def test_a_wrong_settings_file_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(text)
    exit_code, line = failed("mount", "--config", str(file), capsys=capsys)
    assert exit_code == UsageError.exit_code
    assert said in line


def test_settings_are_printed_with_default_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('source = "/pool"\nmountpoint = "/kv"\nnegative_timeout_s = 5')
    assert main(["mount", "--config", str(file), "--print-settings", "--fsync=honour"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["negative_timeout_s", "5.0", "s", "60.0", "s", "a"] in [row[:6] for row in rows]
    assert ["fsync", "honour", "relaxed"] in [row[:3] for row in rows]
    assert ["source", "/pool", "-"] in [row[:3] for row in rows]
    assert main(["mount", "--print-settings", "--set", "lease_s=17"]) == 0
    assert "17.0 s" in capsys.readouterr().out
    exit_code, line = failed("mount", "--print-settings", "--set", "foo=1", capsys=capsys)
    assert exit_code == UsageError.exit_code
    assert "unknown setting 'foo'" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("mkfs", "/none"),
        ("mount", "/none", "/none"),
        ("mount", "--foreground", "/none", "/none"),
        ("umount", "/none"),
        ("fsck", "/none"),
        ("destroy", "/none", "--yes"),
    ],
)
@needs_root
def test_without_root_it_says_so(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    os.seteuid(NOBODY)
    try:
        exit_code, line = failed(*arguments, capsys=capsys)
    finally:
        os.seteuid(0)
    assert exit_code == NotRoot.exit_code
    assert line == f"kvfs {arguments[0]} needs root"


def without(capability: str, *command: str) -> tuple[int, str]:
    """Run *command* as root without *capability*; return its exit code and what it said."""
    done = subprocess.run(
        ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}", *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.returncode, done.stderr


@needs_root
@pytest.mark.parametrize(
    "command",
    [("mkfs", "/none"), ("umount", "/none"), ("bench", "compare", "--self-contained"), ("demo",)],
    ids=" ".join,
)
def test_root_without_its_capability_is_told_so(command: tuple[str, ...]) -> None:
    """mkfs.xfs failed for want of it, and the drive got the blame."""
    exit_code, said = without("sys_admin", *KVFS, *command)
    assert exit_code == NotRoot.exit_code
    assert "CAP_SYS_ADMIN" in said


@needs_root
@pytest.mark.parametrize("verb", ["mkfs", "mount", "fsck"])
def test_a_limit_on_files_is_named(verb: str, tmp_path: Path) -> None:
    """It looked as a full disk, or as a bug of kvfs."""
    command = [*KVFS, verb, "/none", *([str(tmp_path)] if verb == "mount" else [])]
    exit_code, said = without("sys_resource", "prlimit", "--fsize=1048576", *command)
    assert exit_code == ToolMissing.exit_code, said
    assert "LimitFSIZE=infinity" in said
    assert len(said.splitlines()) == 1


@needs_root
@pytest.mark.parametrize("command", [("mkfs", "p", "--capacity", "1G"), ("mount", "p", "kv")])
def test_a_removed_current_directory_is_no_bug(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with contextlib.chdir(gone):
        gone.rmdir()
        exit_code, line = failed(*command, capsys=capsys)
    assert exit_code == UsageError.exit_code
    assert line.startswith("the current directory was removed")


def test_exit_codes_are_distinct() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = [kind.exit_code for kind in kinds if issubclass(kind, CommandError)]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {0, INTERNAL_ERROR_EXIT, INTERRUPTED_EXIT}


def test_an_expected_failure_is_its_own_words() -> None:
    assert explain(MountpointUnusable("no such\n  place")) == ("no such place", 7)
    assert explain(PathMissing("no \x1b[2J\n\u202eon it")) == (r"no \x1b[2J \u202eon it", 20)
    assert explain(Damaged()) == ("Damaged", CommandError.exit_code)
    assert explain(ExceptionGroup("x", [NotRoot("needs root")])) == ("needs root", 3)


def test_a_bug_is_one_line_and_the_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nothing: dict[str, str] = {}
    monkeypatch.setattr(mkfs, "need_root", lambda _what: nothing["boom"])
    exit_code, line = failed("mkfs", "/none", capsys=capsys)
    assert exit_code == INTERNAL_ERROR_EXIT
    assert line.startswith("internal error: KeyError: 'boom' (traceback in ")
    (kept,) = tmp_path.iterdir()
    assert str(kept) in line
    assert "Traceback (most recent call last)" in kept.read_text()
    monkeypatch.setenv("KVFS_DEBUG", "1")
    assert main(["mkfs", "/none"]) == INTERNAL_ERROR_EXIT
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_what: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mkfs, "need_root", interrupt)
    assert failed("mkfs", "/none", capsys=capsys) == (INTERRUPTED_EXIT, "interrupted")


def test_a_reader_that_goes_away_is_no_bug() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = (
        "import sys\nfrom kvfs.cli.main import main\nsys.exit(main(['mount', '--print-settings']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.parametrize("arguments", [("--version",), ("status", "/none"), ("mount", "/none")])
def test_what_only_asks_or_refuses_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys\n"
        "from kvfs.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('imported', *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = done.stdout.splitlines()[-1].split()
    assert imported[0] == "imported"
    assert not set(imported) & set(HEAVY_MODULES)


def test_destroy_asks_only_somebody_who_can_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.cli.mkfs.need_root", lambda _what: None)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - pytest closes it
    with sys.stdin:
        exit_code, line = failed("destroy", "/none", capsys=capsys)
    assert exit_code == UsageError.exit_code
    assert "--yes" in line


def test_status_of_what_is_not_mounted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A place of our own: what others have mounted at a known one in their namespaces is told."""
    exit_code, line = failed("status", str(tmp_path), capsys=capsys)
    assert (exit_code, line) == (errors.NotMounted.exit_code, f"no kvfs is mounted at {tmp_path}")


@needs_root
@pytest.mark.parametrize(
    ("path", "said"),
    [("/none", "nothing is mounted at /none"), ("/proc", "/proc is a mount of type proc")],
)
def test_umount_of_what_is_not_ours(
    path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, line = failed("umount", path, capsys=capsys)
    assert exit_code == errors.NotMounted.exit_code
    assert said in line


def start(monkeypatch: pytest.MonkeyPatch, program: str, wait_s: float = 60.0) -> None:
    """Start *program* in the server's place; ``ready_fd`` is the pipe's number in it."""
    program = f"import os, signal, sys\n{program}"
    monkeypatch.setattr(mount_background, "supervised", partial(in_the_servers_place, program))
    start_in_background(Settings("/none", "/none", start_timeout_s=wait_s), ["mount"])


def test_a_server_that_serves_ends_the_command_and_lives_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "told")
    with open(tmp_path / "told", "rb", opener=lambda p, f: os.open(p, f | os.O_NONBLOCK)) as told:
        start(
            monkeypatch,
            f"told = os.open({str(tmp_path / 'told')!r}, os.O_WRONLY)\n"
            "os.write(ready_fd, b'{\"ready\": true}\\n'); os.close(ready_fd)\n"
            "os.write(told, b'%d %d' % (os.getppid(), os.getsid(0)))\n",
        )
        os.set_blocking(told.fileno(), True)
        supervisor, session = map(int, told.read().split())
    assert session == supervisor != os.getsid(0)
    os.waitpid(supervisor, 0)


def test_what_a_server_says_is_repeated_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartFailed, match="it is ext4") as failure:
        start(
            monkeypatch,
            'os.write(ready_fd, b\'{"error": "it is ext4", "exit_code": 5}\\n\')\n',
        )
    assert failure.value.exit_code == 5
    assert explain(failure.value) == ("it is ext4", 5)


def test_how_far_a_rebuild_is_comes_before_the_outcome() -> None:
    reading, writing = os.pipe()
    pipe = ReadyPipe(writing)
    pipe.say_progress(1024, 3000)
    pipe.say_failed("no room", 7)
    heard: list[tuple[int, int]] = []
    outcome = wait_for_outcome(reading, 60.0, lambda done, total: heard.append((done, total)))
    os.close(reading)
    assert outcome == ("no room", 7)
    assert heard == [(1024, 3000)]


def test_a_server_that_dies_is_told_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServeFailed, match="exited with code 9 before the mount was ready"):
        start(monkeypatch, "sys.exit(9)")


def test_a_server_that_takes_too_long_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "stopped"
    with pytest.raises(ServeFailed, match=r"was not ready after 2 s \(start_timeout_s\)"):
        start(
            monkeypatch,
            f"signal.signal(15, lambda *_: open({str(mark)!r}, 'w').close() or os._exit(0))\n"
            "signal.pause()\n",
            wait_s=2,
        )
    assert mark.exists()


def test_a_module_runs_as_a_program() -> None:
    assert run_kvfs("--version").stdout == f"kvfs {__version__}\n"
