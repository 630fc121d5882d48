"""Bytes that kvfs did not make: decoders raise what they say, and the control socket answers.

A fuzzer that sees which code an input reaches changes right examples (tests/support/fuzz). As a
proof (`make proof`) each decoder is tried for five minutes, or for KVFS_FUZZ_S seconds, and goes on
from what runs before it found (build/fuzz).
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.client.control_socket import peer_pid, socket_paths
from kvfs.core.errors import ServeFailed
from tests.support.fuzz.targets import targets
from tests.support.mounts.mounting import ROOT, Mounted

#: Two minutes for all of them, with what each needs to begin.
IN_CI_S: Final = 3
WHOLE_S: Final = int(os.environ.get("KVFS_FUZZ_S", "300"))
CORPORA: Final = ROOT / "build" / "fuzz"
#: All verbs but ``upgrade``, which starts what it is told to start.
VERBS: Final = (
    "status", "evict", "pin", "unpin", "verify", "pins", "hottest", "job", "cancel", "history",
    "sync", "synced", "record", "recorded",
)  # fmt: skip
KEYS: Final = (
    "paths", "match", "bytes", "unused_for_s", "dry_run", "all", "after", "job", "wait", "ticket",
    "key", "recording", "end",
)  # fmt: skip


@pytest.fixture(
    params=[IN_CI_S, pytest.param(WHOLE_S, marks=pytest.mark.proof)], ids=["ci", "whole"]
)
def time_s(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="the fuzzer is built for x86_64"
)
@pytest.mark.parametrize("name", targets())
def test_a_decoder_raises_what_it_says(name: str, time_s: int, tmp_path: Path) -> None:
    # A machine at load 30 took 17 s for one input, by the clock.
    limits = (f"-max_total_time={time_s}", "-timeout=100", "-rss_limit_mb=1024")
    kept = {"KVFS_FUZZ_CORPORA": str(CORPORA)} if time_s == WHOLE_S else {}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.fuzz",
            name,
            *limits,
            f"-artifact_prefix={tmp_path}/",
        ],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **kept},
    )
    last = "\n".join(done.stderr.splitlines()[-20:])
    print(last)
    assert done.returncode == 0, last
    assert "Done " in last, "it ended before its time"


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS: Final = st.lists(
    st.sampled_from(("", "/", "a", "a/../b", "/kept", "\0", "x" * 5000)), max_size=3
)
ARGS: Final = st.dictionaries(st.sampled_from(KEYS), JSON | PATHS, max_size=4)


@pytest.fixture
def control(mount: Mounted) -> Iterator[socket.socket]:
    """A connection to the control socket of *mount*."""
    (path,) = (path for path in socket_paths() if peer_pid(path) == mount.server_pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(path)
        yield connection


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(do=st.sampled_from(VERBS), args=ARGS)
def test_the_control_socket_answers_whatever_root_sends(
    mount: Mounted, control: socket.socket, do: str, args: dict[str, object]
) -> None:
    control.sendall(json.dumps({"v": 1, "do": do, "args": args}).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        part = control.recv(1 << 20)
        assert part, "it hung up"
        answer += part
    told = json.loads(answer)
    assert told["v"] == 1
    assert told["ok"] or told["exit_code"] != ServeFailed.exit_code, told
    assert mount.status()["server_pid"] == mount.server_pid
