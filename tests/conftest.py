"""What holds for every test: nothing stays open or mounted behind it, no surprise is logged.

A test that expects a warning asks for ``caplog``; that announces it.
"""

import contextlib
import fcntl
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings

from kvfs.pool.open.extent_bytes import stamps_are_exact
from tests.support.clients.stepping import SLOWER, until
from tests.support.forks.process import PARENT
from tests.support.machines.own_mounts import enter_own_mounts
from tests.support.mounts.left_behind import loops_under, mounts_under
from tests.support.mounts.mounting import why_no_mounts
from tests.support.rules.first_difference import told_apart

# How long an example takes says nothing on a machine that others use, too. CI tries the examples
# that were tried before a commit; KVFS_LONG=1 looks for others. CI says at once which one fails: to
# look for a smaller one takes minutes, and whoever mends it does so with a run of his own.
settings.register_profile(
    "kvfs",
    deadline=None,
    derandomize=os.environ.get("KVFS_LONG") != "1",
    phases=[
        phase
        for phase in Phase
        if os.environ.get("CI") != "true" or phase not in (Phase.shrink, Phase.explain)
    ],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile("kvfs")


#: Folders of tests, the one with the longest modules first.
LONGEST_FIRST: Final = ("system", "fuse", "engine", "core")
#: How long the last user of a mount or a loop device may take to let go of it.
LEFT_WAIT_S: Final = 20.0 * SLOWER
#: Why a test may be skipped in CI (the beginning of its reason): what it is about is not there.
SKIPPED_IN_CI: Final = (
    # Both data paths run the same tests.
    "takes a path",
    "promised for the daemon path only",
    "on the daemon path the daemon is the only user of an extent",
    "on the daemon path the close waits for the mapping",
    # A kernel before 6.9 (passthrough, take-over), 6.15 (a limit for requests).
    "data path is daemon: ",
    "the kernel sends nothing again",
    "no take-over",
    "needs Linux 6.",
    # Control groups are the machine's, and a container may have none.
    "no control group for memory can be made",
    # Another machine than x86_64, for which these are not built.
    "Helm's library is for x86_64",
    "the fuzzer is built for x86_64",
)
_OWN_PLACE: Final = pytest.StashKey[Path]()
#: Held shared by every test, alone by one that drops the machine's caches (proc(5), drop_caches).
CACHES_LOCK: Final = Path("/dev/shm/kvfs-test-caches.lock")
#: Held while one waits for the lock above: who comes later comes behind, shared or not.
CACHES_LINE: Final = Path("/dev/shm/kvfs-test-caches.line")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the run a directory and mounts of its own, and let a terminated one take them down.

    pytest's default is a directory for all runs, in which it removes what older ones left: a mount
    that a killed run left there would fail this one. A shell's background job ignores SIGINT, and
    so would all that it starts.
    """
    if config.option.basetemp is None:
        config.option.basetemp = Path(tempfile.mkdtemp(prefix="kvfs-pytest-"))
        config.stash[_OWN_PLACE] = config.option.basetemp
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if why_no_mounts() is None:
        enter_own_mounts()
    PARENT.note_standing()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove that directory again, unless a failed test left something to look at there."""
    place = session.config.stash.get(_OWN_PLACE, None)
    if place is not None and exitstatus == 0:
        shutil.rmtree(place, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot do; in CI nothing is skipped for that.

    The longest modules first, so that all workers end together. What the data path has no part in
    runs on the one that each machine has.
    """
    again = [item for item in items if is_on_the_second_path(item)]
    if again:
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item not in set(again)]
    items.sort(key=_turn)
    for item in items:
        if any(item.iter_markers("proof")):
            item.add_marker(pytest.mark.timeout(0))
    why = why_no_mounts()
    if why is None or os.environ.get("CI") == "true":
        return
    for item in items:
        if any(item.iter_markers("needs_fuse")) or any(item.iter_markers("needs_loop")):
            item.add_marker(pytest.mark.skip(reason=why))


def _turn(item: pytest.Item) -> int:
    """Return when the folder of *item* has its turn."""
    parts = item.path.parts
    return next((turn for turn, name in enumerate(LONGEST_FIRST) if name in parts), 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail in CI what is skipped for another reason than SKIPPED_IN_CI has.

    A test that quietly does not run proves nothing. The connectors have a list of their own
    (tests/connectors/skips.py).
    """
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        listed = why.removeprefix("Skipped: ").startswith(SKIPPED_IN_CI)
        if not listed and "connectors" not in item.path.parts:
            report.outcome = "failed"
            report.longrepr = f"in CI nothing is skipped for this reason: {why}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_assertrepr_compare(
    op: str, left: object, right: object
) -> Generator[None, list[list[str]], list[list[str]]]:
    """Tell large bytes apart by digest and first difference.

    With CI set pytest compares them by difflib, which takes hours for a block.
    """
    told = told_apart(left, right) if op == "==" else None
    if told is None:
        return (yield)
    set_before = os.environ.pop("CI", None)
    try:
        yield
    finally:
        if set_before is not None:
            os.environ["CI"] = set_before
    return [told]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Start all programs as an operator does for what is marked real_exec, and for the proofs.

    Also those of its fixtures, if they are not there yet: mark a whole module that shares one.
    """
    by_exec = any(item.get_closest_marker(name) for name in ("real_exec", "proof"))
    with PARENT.by_exec() if by_exec else contextlib.nullcontext():
        return (yield)


def is_on_the_second_path(item: pytest.Item) -> bool:
    """Whether *item* is marked one_data_path, and runs on the daemon path as well."""
    call = getattr(item, "callspec", None)
    return (
        call is not None
        and any(item.iter_markers("one_data_path"))
        and call.params.get("mounted") == "passthrough"
    )


def open_files() -> dict[str, str]:
    """Return this process's descriptors and what each one leads to."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


@pytest.fixture(autouse=True)
def no_open_file_stays() -> Iterator[None]:
    """Fail a test that leaves more descriptors than it found; longer-lived fixtures came before."""
    stamps_are_exact()  # opens its file at the first use, and keeps it
    before = open_files()
    yield
    after = open_files()
    if len(after) > len(before):
        gc.collect()
        after = open_files()
    left = {fd: what for fd, what in after.items() if before.get(fd) != what}
    assert len(after) <= len(before), f"left open: {left}"


@pytest.fixture(autouse=True)
def caches_of_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the machine's caches: shared, since others' tests count on them, or to drop them.

    What runs in a guest for an hour holds nobody up. A lock on a file of all runs of all checkouts;
    a killed run gives it back with its descriptor.
    """
    if any(request.node.iter_markers("in_guest")):
        yield
        return
    drops = any(request.node.iter_markers("drops_caches"))
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    fd, line_fd = os.open(CACHES_LOCK, flags, 0o666), os.open(CACHES_LINE, flags, 0o666)
    try:
        fcntl.flock(line_fd, fcntl.LOCK_EX)
        fcntl.flock(fd, fcntl.LOCK_EX if drops else fcntl.LOCK_SH)
        fcntl.flock(line_fd, fcntl.LOCK_UN)
        yield
    finally:
        fcntl.flock(line_fd, fcntl.LOCK_UN)
        os.close(line_fd)
        # By name: a process forked meanwhile has the same open file.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


class _Surprises(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name} {record.levelname}: {record.getMessage()}")


@pytest.fixture(autouse=True)
def no_surprise_is_logged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which something was logged as a warning or worse, unannounced."""
    surprises = _Surprises()
    logging.getLogger().addHandler(surprises)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(surprises)
    assert "caplog" in request.fixturenames or not surprises.lines, surprises.lines


def own_places(base: Path) -> tuple[str, ...]:
    """Return how the paths begin that only this test run uses; see ``mounting.workplace``."""
    return (
        f"{base}/",
        *(f"{top}/kvfs-test-{os.getpid()}-" for top in ("/dev/shm", tempfile.gettempdir())),
    )


@pytest.fixture(scope="session")
def kept_mounts() -> set[str]:
    """Mounts and loop devices that outlive their module: a fixture of the session ends them."""
    return set()


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_mounted(
    tmp_path_factory: pytest.TempPathFactory, kept_mounts: set[str]
) -> Iterator[None]:
    """Fail a module that leaves a mount or a loop device of this run behind."""
    places = own_places(tmp_path_factory.getbasetemp())
    yield

    def left_behind() -> set[str]:
        return (mounts_under(places) | loops_under(places)) - kept_mounts

    # The kernel ends a lazily unmounted file system, and with it its loop device, a moment later.
    with contextlib.suppress(AssertionError):
        until(lambda: not left_behind(), "nothing is left behind", LEFT_WAIT_S)
    left = left_behind()
    assert not left, f"left behind: {sorted(left)}"
