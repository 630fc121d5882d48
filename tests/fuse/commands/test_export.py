"""`kvfs export`, with a real exportfs(8) and a real NFS-Ganesha that read what it writes."""

import contextlib
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvfs.client.nfs.nfsd import parse_exports
from kvfs.client.nfs.squash import ROOT, Squash
from kvfs.core import errors
from kvfs.core.mount_name import name_of
from tests.support.clients.stepping import until
from tests.support.machines.own_etc import OwnEtc
from tests.support.machines.own_network import Network, own_network
from tests.support.mounts.mounting import Mounted, own_tmpfs, run_kvfs, skip_without_mounts
from tests.support.nfs.client import NfsClient
from tests.support.nfs.ganesha import Export, Ganesha
from tests.support.rules.documented import of

pytestmark = pytest.mark.needs_fuse

#: An owner to whom the root of a client is squashed.
OWNED: Final = ("-o", "uid=1000,mode=0755", "--capacity=200M")
FIT: Final = "MDCACHE { FD_LWMark_Percent = 0; LRU_Run_Interval = 1; }\n"
LOCAL: Final = ("--client", "127.0.0.1")


class Place(NamedTuple):
    """A mount, and an /etc and a network of one's own."""

    mounted: Mounted
    network: Network
    etc: OwnEtc

    @property
    def kv(self) -> str:
        return str(self.mounted.path)

    @property
    def exports(self) -> str:
        return f"/etc/exports.d/{name_of(self.kv)}.exports"

    def refused(self, *arguments: str) -> tuple[int, str]:
        """Run `kvfs export`, which must fail with one line."""
        done = self.etc.kvfs("export", *arguments, check=False)
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return done.returncode, line.removeprefix("kvfs: ")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    skip_without_mounts()
    with (
        own_network() as network,
        own_tmpfs() as source,
        Mounted(source, network.place / "kv dir", *OWNED) as mounted,
    ):
        yield Place(mounted, network, OwnEtc(network))


@pytest.fixture
def written(place: Place) -> Iterator[str]:
    """The path of an exports file that is there during the test."""
    place.etc.kvfs("export", place.kv, *LOCAL, "--server", "nfsd", "--write")
    yield place.exports
    place.etc.kvfs("export", place.kv, "--remove", "--server", "nfsd")


def nexts(said: str) -> list[str]:
    """Return the commands that come next."""
    return [line.partition("next: ")[2] for line in said.splitlines() if "next: " in line]


def test_exportfs_reads_the_line_as_it_is_meant(place: Place, written: str) -> None:
    """And the doctor then has nothing to say about it."""
    done = place.etc.kvfs("export", place.kv, *LOCAL, "--server", "nfsd", "--json")
    said = json.loads(done.stdout)
    assert said["file"] == written
    assert said["text"] == place.etc.read(written)
    assert not said["runs"]  # no kernel here has an NFS server
    place.etc.run("exportfs", "-ra")
    (export,) = parse_exports(place.etc.read("/var/lib/nfs/etab"), place.kv)
    assert export.client == "127.0.0.1"
    assert export.squash == Squash(ROOT, 1000, 65534)
    uuid = place.mounted.status()["uuid"]
    assert {"rw", "async", "no_subtree_check", "mountpoint", f"fsid={uuid}"} <= export.options
    assert json.loads(
        place.etc.kvfs("export", place.kv, *LOCAL, "--server", "nfsd", "--json").stdout
    )["exported"]
    report = json.loads(place.etc.kvfs("doctor", place.kv, "--json", check=False).stdout)
    assert "NFS exports" in report["passed"]


def test_what_it_prints_is_a_file_that_exportfs_takes(place: Place) -> None:
    printed = place.etc.kvfs("export", place.kv, *LOCAL, "--client", "@h", "--server", "nfsd")
    file = place.network.shown("/etc/exports.d")
    place.etc.run("mkdir", "-p", "/etc/exports.d")
    (file / "printed.exports").write_text(printed.stdout)
    place.etc.run("exportfs", "-ra")
    found = parse_exports(place.etc.read("/var/lib/nfs/etab"), place.kv)
    assert {one.client for one in found} == {"127.0.0.1", "@h"}
    code, line = place.refused(place.kv, *LOCAL, "--server", "nfsd", "--write")
    assert code == errors.ConfigForeign.exit_code
    assert line.startswith("/etc/exports.d/printed.exports exports ")
    (file / "printed.exports").unlink()


def test_writing_again_changes_nothing_and_removing_takes_it_back(place: Place) -> None:
    write = ("export", place.kv, *LOCAL, "--server", "nfsd", "--write")
    assert place.etc.kvfs(*write).stdout.startswith(f"wrote {place.exports}\nnext: ")
    assert place.etc.kvfs(*write).stdout.startswith(f"{place.exports} is up to date\n")
    more = place.etc.kvfs(*write, "--client", "@hosts")
    assert more.stdout.startswith(f"wrote {place.exports}\n")
    assert "@hosts(" in place.etc.read(place.exports)
    done = place.etc.kvfs("export", place.kv, "--remove")
    assert done.stdout == f"removed {place.exports}\nnext: exportfs -ra\n"
    assert not place.network.shown(place.exports).exists()
    again = place.etc.kvfs("export", place.kv, "--remove")
    assert again.stdout == f"no file of kvfs's exports {place.kv}\n"
    place.etc.run("exportfs", "-ra")
    assert place.etc.read("/var/lib/nfs/etab") == ""


def test_the_commands_that_the_page_shows(place: Place) -> None:
    """docs/nfs.md, in its order: printed, written, told to the server, taken back."""
    shows, writes, removes = of("docs/nfs.md", "kvfs export ")
    (tells,) = of("docs/nfs.md", "exportfs ")
    for command in (shows, writes, tells, removes):
        words = [
            place.kv if word == "/kv" else word for word in shlex.split(command, comments=True)
        ]
        if words[0] == "kvfs":
            place.etc.kvfs(*words[1:])
        else:
            place.etc.run(*words)
            assert parse_exports(place.etc.read("/var/lib/nfs/etab"), place.kv)
    assert not place.network.shown(place.exports).exists()


@pytest.mark.parametrize("kind", ["file", "symlink", "exports"])
def test_what_others_wrote_stays(place: Place, kind: str) -> None:
    place.etc.run("mkdir", "-p", "/etc/exports.d")
    theirs = place.network.shown("/etc/exports" if kind == "exports" else place.exports)
    escaped = place.kv.replace(" ", "\\040")
    before = f"# mine\n{escaped} \\\n  *(ro)\n"
    if kind == "symlink":
        place.network.shown("/etc/elsewhere").write_text(before)
        theirs.symlink_to("/etc/elsewhere")
    else:
        theirs.write_text(before)
    refused = (("--write", *LOCAL),) + (() if kind == "exports" else (("--remove",),))
    for arguments in refused:
        code, line = place.refused(place.kv, "--server", "nfsd", *arguments)
        assert code == errors.ConfigForeign.exit_code
        assert ("/etc/exports" if kind == "exports" else place.exports) in line
    shown = "/etc/elsewhere" if kind == "symlink" else str(theirs)
    assert (place.etc.read(shown) if kind == "symlink" else theirs.read_text()) == before
    theirs.unlink()


def test_an_etc_that_is_read_only(place: Place, written: str) -> None:
    place.etc.run("mount", "-o", "remount,ro", "/etc")
    try:
        for arguments in (("--write", "--client", "@other"), ("--remove",)):
            code, line = place.refused(place.kv, "--server", "nfsd", *arguments)
            assert code == errors.ConfigUnwritable.exit_code
            assert line == f"{written}: Read-only file system"
        # It only says what to do, which needs no file.
        assert written in place.etc.kvfs("export", place.kv, *LOCAL, "--server", "nfsd").stdout
    finally:
        place.etc.run("mount", "-o", "remount,rw", "/etc")
    assert os.listdir(place.network.shown("/etc/exports.d")) == [os.path.basename(written)]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "say who may mount it"),
        (("--client", "a b"), 2, "'a b' is not a client"),
        (("--client", "a", "--squash", "most"), 2, "invalid choice: 'most'"),
        (("--client", "a", "--server", "smbd"), 2, "invalid choice: 'smbd'"),
        (("--write", "--remove"), 2, "exclude each other"),
        ((*LOCAL, "--server", "nfsd", "--config", "/x"), 2, "is for NFS-Ganesha only"),
    ],
)
def test_bad_input(place: Place, arguments: tuple[str, ...], code: int, said: str) -> None:
    found, line = place.refused(place.kv, *arguments)
    assert found == code
    assert said in line


def test_a_squash_with_which_nobody_could_store_is_refused() -> None:
    skip_without_mounts()
    with own_tmpfs() as source, Mounted(source, source.parent / "kv", "--capacity=200M") as mount:
        for kind in ("root", "all"):
            arguments = ("export", str(mount.path), *LOCAL, "--squash", kind)
            done = run_kvfs(*arguments, check=False)
            assert done.returncode == errors.UsageError.exit_code
            assert "nobody could store" in done.stderr
        done = run_kvfs("export", str(mount.path), *LOCAL, "--server", "nfsd")
        assert ",no_root_squash,fsid=" in done.stdout


def test_without_root_nothing_is_written(place: Place) -> None:
    for flag in ("--write", "--remove"):
        prefix = ("setpriv", "--reuid=1000", "--clear-groups")
        done = run_kvfs("export", place.kv, *LOCAL, flag, prefix=prefix, check=False)
        assert done.returncode == errors.NotRoot.exit_code
        assert done.stderr == f"kvfs: kvfs export {flag} needs root\n"


def test_no_mount_and_a_dead_one(tmp_path: Path) -> None:
    """The export of a mount that is dead or gone can be taken back."""
    skip_without_mounts()
    done = run_kvfs("export", str(tmp_path), *LOCAL, check=False)
    assert done.returncode == errors.NotMounted.exit_code
    with (
        own_network() as network,
        own_tmpfs() as source,
        Mounted(source, network.place / "kv", "--capacity=200M") as mount,
    ):
        place = Place(mount, network, OwnEtc(network))
        place.etc.kvfs("export", place.kv, *LOCAL, "--server", "nfsd", "--write")
        mount.kill()
        code, line = place.refused(place.kv, *LOCAL)
        assert code == errors.NotMounted.exit_code
        assert line.startswith(f"the server of {place.kv} is dead; `kvfs umount ")
        place.etc.kvfs("export", place.kv, "--remove")
        assert not network.shown(place.exports).exists()


# ---- NFS-Ganesha ----


@contextlib.contextmanager
def ganesha(place: Place, logs: Path, settings: str = "") -> Iterator[Ganesha]:
    """A server that exports something else, with *settings*."""
    other = place.network.place / "other"
    other.mkdir(exist_ok=True)
    try:
        with Ganesha(place.network, logs, Export("/other", other), settings=settings) as server:
            yield server
    finally:
        shutil.rmtree(place.network.place / "ganesha")  # what it knows of clients
        place.network.shown("/run/rpcbind.sock").unlink(missing_ok=True)


@pytest.fixture
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path Ganesha's scanner takes in an ``%include``."""
    return tmp_path_factory.mktemp("ganesha")


_clients = itertools.count()


def store_and_read(place: Place, version: int) -> os.stat_result:
    """Store a block as the root of a client, and read it back; what it is here."""
    with NfsClient(place.network, version, place.kv, f"export-{next(_clients)}") as client:
        client.call("store", "/block", b"block" * 1000)
        assert client.call("read_file", "/block") == b"block" * 1000
    return (place.mounted.path / "block").stat()


def of_ganesha(place: Place, *arguments: str) -> dict[str, Any]:
    done = place.etc.kvfs("export", place.kv, "--server", "ganesha", "--json", *arguments)
    said = json.loads(done.stdout)
    assert isinstance(said, dict)
    return said


def serves(place: Place) -> bool:
    """Whether a client can mount it."""
    try:
        NfsClient(place.network, 3, place.kv, f"export-{next(_clients)}").close()
    except OSError:
        return False
    return True


def test_a_running_ganesha_serves_it_after_the_commands(place: Place, logs: Path) -> None:
    """Each as it is printed: the line that includes the file, and the reload; then back again."""
    with ganesha(place, logs, FIT) as server:
        config = logs / "ganesha.conf"
        before = config.read_text()
        said = of_ganesha(place, *LOCAL, "--write")
        file = logs / f"kvfs-{name_of(place.kv)}.conf"
        assert said["file"] == str(file)
        assert said["runs"]
        assert "MDCACHE" not in file.read_text()
        assert said["remarks"] == []
        assert said["next"][1:] == [f"kill -HUP {server.pid}"]
        for command in said["next"]:
            place.etc.run("sh", "-c", command)
        until(lambda: serves(place), "the export is there")
        for version in (3, 4):
            assert store_and_read(place, version).st_uid == 1000
        assert of_ganesha(place, *LOCAL)["exported"]
        assert config.read_text().startswith(before)

        # Ganesha does not start without a file that is included.
        code, line = place.refused(place.kv, "--remove", "--server", "ganesha")
        assert code == errors.ConfigForeign.exit_code
        place.etc.run("sh", "-c", line.split("`")[1])
        assert config.read_text() == f"{before}\n"
        removed = place.etc.kvfs("export", place.kv, "--remove", "--server", "ganesha")
        assert removed.stdout == f"removed {file}\nnext: kill -HUP {server.pid}\n"
        place.etc.run("kill", "-HUP", str(server.pid))
        until(lambda: not serves(place), "the export is gone")


def test_one_that_keeps_files_open_is_told_of_and_restarted(place: Place, logs: Path) -> None:
    """At its default settings; the file then brings the settings, for which it starts anew."""
    with ganesha(place, logs) as server:
        said = of_ganesha(place, *LOCAL, "--write")
        include, restart = said["next"]
        place.etc.run("sh", "-c", include)
        restart_words = f"kill {server.pid}; while kill -0 {server.pid} 2> /dev/null; "
        assert restart.startswith(restart_words)
        server.stop()  # what the command does, but for the test's own process
        server.settings = f'%include "{said["file"]}"\n'
        server.start()
        assert store_and_read(place, 3).st_uid == 1000
        # Nothing else is to be said of this server; /other is not kvfs's.
        report = json.loads(place.etc.kvfs("doctor", place.kv, "--json", check=False).stdout)
        assert "NFS-Ganesha" in report["passed"]
        said = of_ganesha(place, *LOCAL, "--write")
        assert not said["changed"]
        assert said["next"] == [f"kill -HUP {server.pid}"]
    place.etc.run("rm", said["file"])


def test_a_block_that_was_evicted_is_soon_missed(place: Place, logs: Path) -> None:
    """At its defaults Ganesha goes on finding it for a minute."""
    said = of_ganesha(place, *LOCAL)
    with (
        ganesha(place, logs, said["text"]) as server,
        NfsClient(place.network, 3, place.kv, f"export-{next(_clients)}") as client,
    ):
        client.call("mkdir", "/soon")
        client.call("store", "/soon/block", b"x" * 4096)
        client.call("stat", "/soon/block")
        until(lambda: f"{place.kv}/soon/block" not in server.open_paths(), "Ganesha closed it")
        run_kvfs("evict", f"{place.kv}/soon")

        def is_missed() -> bool:
            try:
                client.call("stat", "/soon/block")
            except FileNotFoundError:
                return True
            return False

        until(is_missed, "ENOENT", 15.0)


def test_somebody_elses_cache_settings_and_exports_are_respected(place: Place, logs: Path) -> None:
    """A second MDCACHE block would take back what the first one says."""
    settings = "CacheInode { FD_LWMark_Percent = 50; Entries_HWMark = 5000; }\n"
    with ganesha(place, logs, settings):
        said = of_ganesha(place, *LOCAL)
        assert "MDCACHE" not in said["text"]
        assert "set FD_LWMark_Percent = 0; and LRU_Run_Interval = 1; there" in said["remarks"][0]
    theirs = (
        f'EXPORT {{ Export_Id = 9; Path = "{place.kv}"; Pseudo = /mine; FSAL {{ Name = VFS; }} }}'
    )
    with ganesha(place, logs, theirs):
        code, line = place.refused(place.kv, *LOCAL, "--server", "ganesha", "--write")
        assert code == errors.ConfigForeign.exit_code
        assert line.startswith(f"{logs}/ganesha.conf exports {place.kv} already")


def test_the_last_cache_block_is_what_a_real_server_takes(place: Place, logs: Path) -> None:
    """What kvfs's reader of its configuration believes: it starts from the defaults again."""
    with ganesha(place, logs, f"{FIT}MDCACHE {{ Entries_HWMark = 5000; }}\n") as server:
        other = place.network.place / "other"
        with NfsClient(place.network, 3, "/other", f"export-{next(_clients)}") as client:
            for name in ("one", "two"):
                client.call("store", f"/{name}", b"x" * 4096)
        kept = [path for path in server.open_paths() if path.startswith(f"{other}/")]
        assert len(kept) == 2


def test_doctor_sees_what_is_kept_open_and_umount_who_keeps_it(place: Place, logs: Path) -> None:
    said = of_ganesha(place, *LOCAL)
    block = said["text"].partition("EXPORT {")[2].replace("1000", "-2")
    with ganesha(place, logs, f"EXPORT {{{block}") as server:
        (place.mounted.path / "open").mkdir(mode=0o777)
        (place.mounted.path / "open").chmod(0o777)
        with NfsClient(place.network, 3, place.kv, f"export-{next(_clients)}") as client:
            client.call("store", "/open/one", b"x" * 4096)
        report = json.loads(place.etc.kvfs("doctor", place.kv, "--json", check=False).stdout)
        found = [one for one in report["findings"] if one["check"] == "NFS-Ganesha"]
        keeps, refuses = found
        config = f"{logs}/ganesha.conf"
        assert keeps["problem"] == (
            f"NFS-Ganesha (process {server.pid}) keeps files open that no client uses: in {config} "
            "FD_LWMark_Percent is 50 and LRU_Run_Interval 90; it has 1 file of the mount open"
        )
        assert refuses["severity"] == "note"
        assert "with its root taken for uid 4294967294" in refuses["problem"]
        done = run_kvfs("umount", place.kv, check=False)
        assert done.returncode == errors.MountpointUnusable.exit_code
        end = f"{server.pid} (ganesha.nfsd, an NFS server): `kill {server.pid}` ends that"
        assert done.stderr == f"kvfs: {place.kv} is busy: used by {end}\n"


@pytest.mark.parametrize("verb", ["mount", "umount"])
def test_a_server_of_a_dead_mount_is_told_of(verb: str, logs: Path) -> None:
    skip_without_mounts()
    with (
        own_network() as network,
        own_tmpfs() as source,
        Mounted(source, network.place / "kv", "--capacity=200M") as mount,
        Ganesha(network, logs, Export("/kv", mount.path)) as server,
    ):
        mount.kill()
        arguments = (str(source), str(mount.path)) if verb == "mount" else (str(mount.path),)
        done = run_kvfs(verb, *arguments)
        assert f"; NFS-Ganesha (process {server.pid}) still serves the dead one: `kill " in (
            done.stderr
        )
        assert len(done.stderr.splitlines()) == 1
        server.kill()
        if verb == "mount":
            mount.adopt()
