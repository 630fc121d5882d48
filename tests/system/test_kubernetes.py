"""What docs/kubernetes.md promises of mounts between pods, in mount namespaces as a node has them.

``Bidirectional`` is a shared bind mount, ``HostToContainer`` one that takes what the node gets.
"""

import contextlib
import re
import subprocess
import sys
from typing import Final

import pytest

from kvfs.machine.mountpoint_guard import unguard
from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_fuse

#: The node; then a client's pod, which starts first; then a server's pod, twice.
NODE: Final = """\
cd {place}
mkdir mounts mounts/kv pool client
mount --bind mounts mounts
mount --make-rshared mounts
kvfs() {{ PYTHONPATH={root} {python} -P -m kvfs.cli.main "$@"; }}
mkfifo never
unshare --mount --propagation slave sh -c 'mount --rbind mounts client; : >ready; read x <never' &
client=$!
exec 9<>never
until [ -e ready ]; do :; done
in_client() {{ nsenter -t $client -m sh -c "cd {place}; $1"; }}
serve() {{ unshare --mount --propagation unchanged sh -euc '
    PYTHONPATH={root} {python} -P -m kvfs.cli.main mount --guard --capacity=64M pool mounts/kv'; }}
serve
in_client 'echo stored >client/kv/tmp; mv client/kv/tmp client/kv/block'
echo "on the node: $(cat mounts/kv/block)"
kill -KILL $(kvfs status mounts/kv --json | {python} -c 'import json, sys
status = json.load(sys.stdin)
print(status["supervisor_pid"], status["server_pid"])')
in_client 'cat client/kv/block' 2>/dev/null && echo "dead: still there"
serve
echo "after a restart: $(in_client 'cat client/kv/block')"
kvfs umount mounts/kv
in_client 'echo lost >client/kv/block' 2>/dev/null && echo "stored on the node"
kill $client
"""


def test_a_client_that_started_first_sees_each_mount_of_the_server() -> None:
    skip_without_mounts()
    with workplace() as place:
        script = NODE.format(place=place, root=ROOT, python=sys.executable)
        try:
            done = subprocess.run(
                ["unshare", "--mount", "--propagation", "private", "bash", "-uc", script],
                capture_output=True,
                text=True,
                timeout=COMMAND_WAIT_S,
                check=False,
            )
        finally:  # what is guarded cannot be removed
            with contextlib.suppress(FileNotFoundError):
                unguard(str(place / "mounts" / "kv"))
    told = done.stdout.splitlines()
    assert "on the node: stored" in told, done.stderr
    assert told[-1] == "after a restart: stored", done.stderr
    assert "dead: still there" not in told


def test_the_examples_mount_the_folder_above_the_mountpoint() -> None:
    """A mount on the volume's own top would stay in its pod."""
    server = (ROOT / "docs" / "kubernetes" / "daemonset.yaml").read_text()
    client = (ROOT / "docs" / "kubernetes" / "client.yaml").read_text()
    (mountpoint,) = re.findall(r'mountpoint = "(.+)"', server)
    above = mountpoint.rpartition("/")[0]
    given = re.search(rf"mountPath: {above}\n(?: +#.*\n)* +mountPropagation: (\w+)", server)
    assert given is not None
    assert given[1] == "Bidirectional"
    assert f"path: {above}\n" in server
    assert f"path: {above}\n" in client
    assert "mountPropagation: HostToContainer" in client
    assert "hostPID: true" in server
