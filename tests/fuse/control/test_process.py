"""The server's manners: bounded log lines, limits, the collector, and systemd's ear."""

import contextlib
import gc
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import UsageError
from kvfs.core.settings import Settings
from mount.process import logs
from mount.process.logs import (
    KINDS_MAX,
    WINDOW_S,
    RateLimited,
    SyslogHandler,
    apply_levels,
    close_logging,
    set_up_logging,
)
from mount.supervisor.systemd import Systemd
from tests.support.mounts.mounting import ROOT

LINES_A_MINUTE = 3


class Lines(logging.Handler):
    """Keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.closed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def close(self) -> None:
        self.closed = True
        super().close()


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def target() -> Lines:
    return Lines()


@pytest.fixture
def log(target: Lines, clock: Clock) -> Iterator[logging.Logger]:
    """A logger of its own behind the rate limit."""
    logger = logging.Logger("kvfs.test")  # noqa: LOG001 - without the root handlers
    handler = RateLimited(target, LINES_A_MINUTE, clock)
    logger.addHandler(handler)
    yield logger
    handler.close()


@pytest.fixture
def root_logging() -> Iterator[None]:
    """Whatever a test sets up for the whole process is taken back."""
    root = logging.getLogger()
    level, raising, disabled = root.level, logging.raiseExceptions, root.manager.disable
    yield
    close_logging()
    root.setLevel(level)
    logging.raiseExceptions = raising
    logging.disable(disabled)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """A datagram socket at tmp_path/socket, as syslog or systemd has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.settimeout(10)
        yield listening


def test_a_storm_of_one_line_is_cut_and_counted(
    log: logging.Logger, target: Lines, clock: Clock
) -> None:
    for number in range(10):
        log.warning("lost extent %d", number)
    log.error("another kind")
    assert target.lines == [
        "WARNING lost extent 0",
        "WARNING lost extent 1",
        "WARNING lost extent 2",
        "ERROR another kind",
    ]
    clock.now_s += WINDOW_S
    log.warning("lost extent %d", 10)
    assert target.lines[4:] == [
        "WARNING suppressed 7 more of: lost extent %d",
        "WARNING lost extent 10",
    ]


def test_what_was_left_out_is_told_by_the_next_line_of_any_kind(
    log: logging.Logger, target: Lines, clock: Clock
) -> None:
    for number in range(5):
        log.error("lost extent %d", number)
    clock.now_s += WINDOW_S
    log.info("calm")
    assert target.lines[3:] == ["ERROR suppressed 2 more of: lost extent %d", "INFO calm"]


def test_closing_tells_what_was_left_out(target: Lines, clock: Clock) -> None:
    handler = RateLimited(target, 1, clock)
    for _ in range(3):
        handler.handle(logging.LogRecord("kvfs", logging.INFO, "", 0, "again", None, None))
    handler.close()
    assert target.lines == ["INFO again", "INFO suppressed 2 more of: again"]
    assert target.closed


def test_the_kinds_that_are_remembered_are_bounded(
    log: logging.Logger, target: Lines, clock: Clock
) -> None:
    for number in range(KINDS_MAX + 100):
        log.warning(f"made by hand {number}")  # noqa: G004 - the mistake this bound is for
    assert len(target.lines) == KINDS_MAX + LINES_A_MINUTE


def record_of(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("kvfs", level, "", 0, text, None, None)


def test_syslog_gets_a_priority_and_the_pool(listening: socket.socket) -> None:
    handler = SyslogHandler("kv", listening.getsockname())
    for level, priority in (
        (logging.DEBUG, 31),
        (logging.INFO, 30),
        (logging.WARNING, 28),
        (logging.ERROR, 27),
        (logging.CRITICAL, 26),
    ):
        handler.handle(record_of(level, "full"))
        assert listening.recv(65_536) == f"<{priority}>kvfs[{os.getpid()}]: kv: full".encode()
    handler.close()


def test_a_name_that_is_no_text_is_logged_all_the_same(listening: socket.socket) -> None:
    handler = SyslogHandler("kv", listening.getsockname())
    handler.handle(record_of(logging.INFO, "lost \udcff"))
    handler.close()
    assert listening.recv(65_536).endswith(rb": lost \udcff")


@pytest.mark.usefixtures("root_logging")
def test_a_full_syslog_loses_lines_but_never_waits(listening: socket.socket) -> None:
    logging.raiseExceptions = False
    handler = SyslogHandler("kv", listening.getsockname())
    for _ in range(2000):
        handler.handle(record_of(logging.INFO, "again"))
    handler.close()
    listening.setblocking(False)
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while listening.recv(4096):
            taken += 1
    assert 0 < taken < 2000


@pytest.mark.usefixtures("root_logging")
def test_a_restarted_syslog_is_found_again(tmp_path: Path) -> None:
    logging.raiseExceptions = False
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as first:
        first.bind(path)
        handler = SyslogHandler("kv", path)
    os.unlink(path)
    handler.handle(record_of(logging.INFO, "lost"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as second:
        second.bind(path)
        handler.handle(record_of(logging.INFO, "again"))
        second.settimeout(10)
        assert second.recv(65_536).endswith(b": again")
    handler.close()


@pytest.mark.usefixtures("root_logging")
def test_a_log_file_takes_lines_of_the_level_and_a_reload_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "kv.log"
    settings = Settings(name="kv", log_file=str(path), log_level="info")
    assert set_up_logging(settings, background=True) == str(path)
    logging.getLogger("kvfs.test").debug("before")
    logging.getLogger("kvfs.test").info("first")
    apply_levels(settings.reloaded(Settings(log_level="debug"))[0])
    logging.getLogger("kvfs.test").debug("second")
    apply_levels(settings.reloaded(Settings(log_level="off"))[0])
    assert not logging.getLogger("kvfs.test").isEnabledFor(logging.CRITICAL)
    close_logging()
    written = path.read_text()
    assert "INFO kvfs.test: first" in written
    assert "DEBUG kvfs.test: second" in written
    assert "before" not in written


@pytest.mark.usefixtures("root_logging")
def test_a_log_file_that_cannot_be_is_a_wrong_setting(tmp_path: Path) -> None:
    settings = Settings(name="kv", log_file=str(tmp_path / "none" / "kv.log"))
    with pytest.raises(UsageError, match="No such file"):
        set_up_logging(settings, background=True)


@pytest.mark.usefixtures("root_logging")
def test_the_background_logs_to_the_first_place_that_listens(
    tmp_path: Path, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        logs, "SyslogHandler", lambda pool: SyslogHandler(pool, listening.getsockname())
    )
    monkeypatch.setattr(logs, "log_path", lambda name: str(tmp_path / f"{name}.log"))
    assert set_up_logging(Settings(name="kv"), background=True) == "syslog"
    monkeypatch.setattr(logs, "SyslogHandler", lambda pool: SyslogHandler(pool, "/none"))
    assert set_up_logging(Settings(name="kv"), background=True) == str(tmp_path / "kv.log")
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert set_up_logging(Settings(name="kv"), background=False) == "stderr"


@pytest.mark.usefixtures("root_logging")
def test_off_means_that_no_line_is_made() -> None:
    assert set_up_logging(Settings(log_level="off"), background=True) == "nowhere"
    assert not logging.getLogger("kvfs.test").isEnabledFor(logging.CRITICAL)


def test_systemd_hears_what_is_said(listening: socket.socket) -> None:
    assert Systemd({"NOTIFY_SOCKET": listening.getsockname()}).notify("READY=1", "STATUS=serving")
    assert listening.recv(4096) == b"READY=1\nSTATUS=serving"


def test_without_systemd_nothing_is_said(tmp_path: Path) -> None:
    assert not Systemd({}).notify("READY=1")
    assert not Systemd({"NOTIFY_SOCKET": str(tmp_path / "none")}).notify("READY=1")


def adopted(program: str) -> list[str]:
    """Run *program* in a process of its own after ``adopt`` and return what it printed."""
    start = (
        "import resource, sys, gc, ctypes\n"
        "from kvfs.core.settings import Settings\n"
        "from kvfs.machine.process_limits import adopt, settle_memory\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_manners_are_taken_on_or_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    score, limit, *refusals = adopted(
        "refusals = adopt(Settings(oom_score_adj=7, open_files_max=1024))\n"
        "print(open('/proc/self/oom_score_adj').read().strip())\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "print(*refusals, sep='\\n')\n"
    )
    assert score == "7"
    assert int(limit) >= 1024
    assert all(refusal.startswith("PR_SET_IO_FLUSHER") for refusal in refusals if refusal)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_open_files_rise_as_far_as_the_machine_lets_them() -> None:
    limit, hard = adopted(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(7)[1]))\n"
        "adopt(Settings(oom_score_adj=0))\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), sep='\\n')\n"
    )
    assert int(limit) == min(int(hard), Settings().open_files_max)


def test_what_exists_at_the_start_is_out_of_the_collectors_sight() -> None:
    frozen, threshold = adopted(
        "settle_memory()\nprint(gc.get_freeze_count(), gc.get_threshold()[0], sep='\\n')\n"
    )
    assert int(frozen) > 1000
    assert int(threshold) > gc.get_threshold()[0]


def test_a_long_line_is_cut_to_what_the_socket_takes(listening: socket.socket) -> None:
    handler = SyslogHandler("kv", listening.getsockname())
    handler.handle(record_of(logging.INFO, "x" * 1_000_000))
    handler.close()
    listening.setblocking(False)
    assert len(listening.recv(1 << 20)) == 32 << 10
