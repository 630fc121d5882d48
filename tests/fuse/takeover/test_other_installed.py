"""A package installed beside a running mount: servers that die are followed by their own kind.

Only ``kvfs upgrade`` lets another version serve. If the files of the version that serves are gone,
and the process that had imported them as well, what is installed is asked first.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import __version__
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import CommandFailed, run_kvfs, workplace
from tests.support.mounts.other_version import OTHER_VERSION, Installed
from tests.support.mounts.places import blank_place
from tests.support.mounts.supervised import Supervised, skip_without_takeover, templates_of

pytestmark = pytest.mark.needs_fuse

#: It declines whatever the one before has left.
OTHER_FORMAT = ("kvfs/core/records.py", "INDEX_FORMAT: Final = 1\n", "INDEX_FORMAT: Final = 99\n")


@pytest.fixture
def installed() -> Iterator[Installed]:
    """Two versions of kvfs."""
    with workplace("disk") as place:
        yield Installed(place)


@pytest.fixture(params=["passthrough", "daemon"])
def mounted(installed: Installed, request: pytest.FixtureRequest) -> Iterator[Supervised]:
    """A mount of the one that is installed."""
    prefix = ("env", f"--chdir={installed.here}", f"PYTHONPATH={installed.here}")
    with blank_place() as place:
        (place / "pool").mkdir(exist_ok=True)
        flags = ("--capacity=64M", f"--data-path={request.param}")
        with Supervised(place / "pool", place / "kv", *flags, prefix=prefix) as mount:
            skip_without_takeover(mount)
            yield mount


def test_a_server_that_dies_is_followed_by_its_own_version(
    mounted: Supervised, installed: Installed
) -> None:
    """[taken-over] Twice; what is installed meanwhile could not even read the pool."""
    installed.change(*OTHER_FORMAT)
    with (mounted.path / "draft").open("xb", buffering=0) as draft:
        for word in (b"one ", b"two ", b"three"):
            draft.write(word)
            if word == b"one ":
                installed.switch()
            mounted.kill_server()
            mounted.follow()
            assert mounted.status()["version"] == __version__
    (mounted.path / "draft").rename(mounted.path / "block")
    assert (mounted.path / "block").read_bytes() == b"one two three"
    assert mounted.status()["upgrades"] == 0
    done = run_kvfs("upgrade", str(mounted.path), prefix=mounted.prefix, check=False)
    assert "format of the index" in done.stderr
    assert mounted.status()["takeover"] == "possible"


def test_a_version_that_could_follow_waits_for_the_order(
    mounted: Supervised, installed: Installed
) -> None:
    installed.switch()
    mounted.kill_server()
    mounted.follow()
    assert mounted.status()["version"] == __version__
    run_kvfs("upgrade", str(mounted.path), prefix=mounted.prefix)
    mounted.adopt()
    assert mounted.status()["version"] == OTHER_VERSION
    installed.switch()
    mounted.kill_server()
    mounted.follow()
    assert mounted.status()["version"] == OTHER_VERSION


def lose_template(mounted: Supervised) -> None:
    """Kill the process of which servers are forked, whose files have changed."""
    (template,) = templates_of(mounted.supervisor_pid)
    os.kill(template, signal.SIGKILL)
    until(lambda: mounted.status()["takeover"] != "possible", "it is told that there is none")
    assert "the files of the version that served have changed" in mounted.status()["takeover"]


def test_without_the_files_of_its_version_one_that_can_goes_on(
    mounted: Supervised, installed: Installed
) -> None:
    installed.switch()
    lose_template(mounted)
    assert mounted.status()["version"] == __version__
    (mounted.path / "block").write_bytes(b"kept")
    mounted.kill_server()
    mounted.follow()
    status = mounted.status()
    assert (status["version"], status["takeover"]) == (OTHER_VERSION, "possible")
    assert (mounted.path / "block").read_bytes() == b"kept"
    assert f"version {OTHER_VERSION} goes on, which is installed now" in log_of(mounted)


def test_without_the_files_of_its_version_one_that_cannot_is_not_tried(
    mounted: Supervised, installed: Installed
) -> None:
    """The calls end, and log and status say why, and how to bring the mount back."""
    installed.change(*OTHER_FORMAT)
    installed.switch()
    lose_template(mounted)
    mounted.kill_server()
    with pytest.raises(OSError, match=r"not connected|abort"):
        (mounted.path / "block").write_bytes(b"lost")
    until(lambda: not os.path.exists(f"/proc/{mounted.supervisor_pid}"), "the supervisor ends")
    with pytest.raises(CommandFailed, match=r"format of the index.* brings it back") as failure:
        run_kvfs("status", str(mounted.path), prefix=mounted.prefix)
    assert f"kvfs mount {mounted.source}" in str(failure.value)
    assert "no server can be had" in log_of(mounted)
    installed.switch()
    mounted.start()
    assert mounted.status()["version"] == __version__


def test_a_template_that_dies_comes_again_of_the_same_files(mounted: Supervised) -> None:
    (before,) = templates_of(mounted.supervisor_pid)
    os.kill(before, signal.SIGKILL)

    def another() -> bool:
        return templates_of(mounted.supervisor_pid) not in ([], [before])

    until(another, "another one has begun")
    mounted.kill_server()
    mounted.follow()
    assert mounted.status()["takeover"] == "possible"
    assert "the process of which servers are forked: it was killed by signal 9" in log_of(mounted)


def test_a_symlink_that_another_version_gets_is_no_change_of_the_one_that_serves(
    installed: Installed, tmp_path: Path
) -> None:
    """As ``current`` in a folder of versions: its template comes again of its own files."""
    current = tmp_path / "current"
    current.symlink_to(installed.here)
    prefix = ("env", "--chdir=/", f"PYTHONPATH={current}")
    with blank_place() as place:
        (place / "pool").mkdir(exist_ok=True)
        with Supervised(place / "pool", place / "kv", "--capacity=64M", prefix=prefix) as mount:
            current.unlink()
            current.symlink_to(installed.aside)
            test_a_template_that_dies_comes_again_of_the_same_files(mount)
            assert mount.status()["version"] == __version__


def log_of(mounted: Supervised) -> str:
    return Path(mounted.log_file).read_text()
