"""An object store of a test's own: Ceph's, its objects in memory, in a network of ``own_network``.

A monitor, one OSD over a MemStore and a gateway (radosgw), by names that the network's own
/etc/hosts knows. Their programs are Debian's, unpacked by tests/connectors/install.sh and never
installed. It serves after some three seconds.
"""

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.clients.stepping import until
from tests.support.machines.own_network import Network
from tests.support.mounts.mounting import COMMAND_WAIT_S

HOST: Final = "s3.example.com"
_ENDPOINT: Final = "http://" + HOST
#: A gateway that begins may take a connection and answer it much later.
_CURL: Final = ("curl", "--silent", "--max-time", "5")
#: Of its one user, as docs/connectors/object-store.md says them.
_ACCESS_KEY: Final = "KEY"
_SECRET_KEY: Final = "SECRET"
_FSID: Final = "6f1d1f0e-0000-4000-8000-000000000336"
_MONITOR: Final = "v2:127.0.0.1:3300/0"
#: No keys among themselves: nobody else is in the network. Nothing is copied, nothing waits for a
#: manager, and a change of the map is proposed at once.
_SETTINGS: Final = """\
[global]
fsid = {fsid}
mon host = {monitor}
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms bind ipv6 = false
run dir = {place}
crash dir = {place}
admin socket =
pid file =
keyring = {place}/keyring
log file = {place}/$name.log
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
mon data = {place}/monitor
mon cluster log file = {place}/cluster.log
mon data avail crit = 0
paxos propose interval = 0.05
paxos min wait = 0.01
osd data = {place}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
rgw data = {place}/gateway
rgw dns name = {host}
rgw frontends = beast endpoint=127.0.0.1:80
rgw enable apis = s3
rgw run sync thread = false
"""
_MEMORY_BYTES: Final = 1 << 30
#: As whom gateway and commands speak, after which Ceph names the log of the gateway.
_CLIENT: Final = "client.admin"
#: What a failure shows of a log.
_TAIL: Final = 4000


class ObjectStore:
    """It serves from ``object_store`` on, until that is left."""

    def __init__(self, network: Network, programs: Path) -> None:
        """*programs* is the folder into which Debian's packages were unpacked."""
        self._network = network
        self._place = network.place / "object-store"
        self._programs = programs / "usr" / "bin"
        assert (self._programs / "radosgw").exists(), "sh tests/connectors/install.sh unpacks it"
        (libraries,) = (programs / "usr" / "lib").glob("*-linux-gnu")
        places = (libraries, libraries / "ceph", programs / "lib" / libraries.name)
        self._environment = f"LD_LIBRARY_PATH={':'.join(map(str, places))}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._place.mkdir()
        self._settings = self._place / "ceph.conf"
        self._settings.write_text(
            _SETTINGS.format(
                fsid=_FSID,
                monitor=_MONITOR,
                place=self._place,
                libraries=libraries,
                memory_bytes=_MEMORY_BYTES,
                host=HOST,
            )
        )

    def start(self) -> None:
        """Make the store, empty, with one user, and serve it."""
        monitors, osds = str(self._place / "monitors"), str(self._place / "osds")
        for directory in ("monitor", "osd"):
            (self._place / directory).mkdir()
        self._run(
            *("monmaptool", "--create", "--enable-all-features", "--fsid", _FSID),
            *("--addv", "a", f"[{_MONITOR}]", monitors),
        )
        self._run("osdmaptool", "--createsimple", "1", osds)
        self._ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--osdmap", osds)
        self._serve("ceph-mon", "-i", "a")
        self._ceph("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", _FSID)
        self._serve("ceph-osd", "-i", "0")
        self._ceph(
            *("radosgw-admin", "user", "create", "--uid=kv", "--display-name=kv"),
            *(f"--access-key={_ACCESS_KEY}", f"--secret={_SECRET_KEY}"),
        )
        self.start_gateway()

    def start_gateway(self) -> None:
        """Serve what the store holds, by S3."""
        self._serve("radosgw", "-n", _CLIENT)
        until(self._answers, "the gateway answers")

    def stop_gateway(self) -> None:
        """Nobody answers any more: a connection is refused. The objects stay."""
        self._end("radosgw")

    @contextlib.contextmanager
    def hung_gateway(self) -> Iterator[None]:
        """Until this is left a connection is taken, and nothing is answered."""
        gateway = self._running["radosgw"]
        gateway.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            gateway.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all of it. What it held is gone."""
        for name in reversed(list(self._running)):
            self._end(name)

    def make_bucket(self, name: str) -> None:
        """Make a bucket, as its user does."""
        signed = ("--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{_ACCESS_KEY}:{_SECRET_KEY}")
        # rgw wants this header among those that are signed.
        body = ("--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD")
        asked = ("--show-error", "--fail-with-body", "-X", "PUT")
        self._inside(*_CURL, *asked, *signed, *body, f"{_ENDPOINT}/{name}")

    def objects(self, bucket: str) -> dict[str, int]:
        """Return the names of the objects in *bucket*, with their sizes in bytes."""
        listed = json.loads(self._ceph("radosgw-admin", "bucket", "list", f"--bucket={bucket}"))
        return {one["name"]: int(one["meta"]["size"]) for one in listed}

    def requests(self, method: str) -> int:
        """Return how many requests of an HTTP *method* the gateway has logged."""
        return len(re.findall(rf'beast: .*?"{method} /', self._log()))

    def _answers(self) -> bool:
        assert self._running["radosgw"].poll() is None, self._log()[-_TAIL:]
        done = subprocess.run(
            self._network.inside(*_CURL, "--output", "/dev/null", _ENDPOINT),
            check=False,
        )
        return done.returncode == 0

    def _ceph(self, program: str, *arguments: str) -> str:
        return self._run(program, "-c", str(self._settings), *arguments)

    def _run(self, program: str, *arguments: str) -> str:
        return self._inside("env", self._environment, str(self._programs / program), *arguments)

    def _inside(self, *command: str) -> str:
        done = subprocess.run(
            self._network.inside(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, program: str, *arguments: str) -> None:
        """Start one of its three servers; it may be killed at any time."""
        command = (str(self._programs / program), "-c", str(self._settings), *arguments, "-f")
        with (self._place / f"{program}.out").open("ab") as output:
            self._running[program] = self._network.start(
                "env", self._environment, *command, output=output
            )

    def _end(self, program: str) -> None:
        process = self._running.pop(program)
        process.kill()
        process.wait()

    def _log(self) -> str:
        return (self._place / f"{_CLIENT}.log").read_text(errors="replace")


@contextlib.contextmanager
def object_store(network: Network, programs: Path, *buckets: str) -> Iterator[ObjectStore]:
    """Serve one in *network*, with empty *buckets*; leaving it takes away all of it.

    Each bucket has a host of its own there (``BUCKET.HOST``, "virtual-hosted"), and all have HOST.
    """
    names = [HOST, *(f"{bucket}.{HOST}" for bucket in buckets)]
    hosts = network.place / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {' '.join(names)}\n")
    subprocess.run(network.inside("mount", "--bind", str(hosts), "/etc/hosts"), check=True)
    store = ObjectStore(network, programs)
    try:
        store.start()
        for bucket in buckets:
            store.make_bucket(bucket)
        yield store
    finally:
        store.stop()
