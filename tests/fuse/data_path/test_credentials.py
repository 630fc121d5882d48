"""What a thread may do is read from /proc, and nothing is guessed."""

import os
import subprocess
from pathlib import Path

import pytest

from mount.files.callers import Credentials, credentials_of
from tests.support.clients.callers import Caller

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
GROUP, OTHERS = 7777, 8888


def test_credentials_are_those_of_the_thread() -> None:
    with Caller(1000, 2000, groups=[GROUP, OTHERS]) as caller, Caller() as root:
        caller.os("getpid")
        assert credentials_of(caller.pid) == Credentials(
            1000, 2000, frozenset({GROUP, OTHERS}), overrides=False
        )
        root.os("getpid")
        of_root = credentials_of(root.pid)
        assert of_root is not None
        assert (of_root.uid, of_root.overrides) == (0, True)
    # An ended one's number may be another's by now: of this one there is never a process (proc(5)).
    assert credentials_of(int(Path("/proc/sys/kernel/pid_max").read_text())) is None


def test_capabilities_of_another_user_namespace_say_nothing() -> None:
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", "echo there; read _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        assert root.stdout.readline() == b"there\n"
        its = credentials_of(root.pid)
        root.communicate()
    assert its is not None
    assert (its.uid, its.overrides) == (0, False)
