"""What an export must say: squashes, exports(5) lines, Ganesha's blocks. No server is here."""

import itertools
import os
import re
import shlex
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.client.nfs import ganesha, ganesha_config
from kvfs.client.nfs.export import own_text
from kvfs.client.nfs.ganesha import config_of
from kvfs.client.nfs.ganesha_config import (
    FIT,
    CacheSettings,
    GaneshaExport,
    cache_settings,
    export_id_of,
    export_text,
    exports_of,
    filesystem_id_of,
    includes,
    parse,
)
from kvfs.client.nfs.nfsd import export_line, options_of, own_fsid, parse_exports
from kvfs.client.nfs.plan import CLIENT_OPTIONS, ExportPlan, client_of, marked
from kvfs.client.nfs.squash import ALL, KINDS, NOBODY_ID, NONE, ROOT, Root, Squash, fitting
from kvfs.core.errors import UsageError
from tests.support.mounts.mounting import ROOT as PROJECT

UUID: Final = "0e3c1ff2-0c2d-4b2c-9a5e-6f0e3c1ff20c"
ROOTS: Final = [
    Root(uid, gid, mode)
    for uid, gid in itertools.product((0, 1000, NOBODY_ID), (0, 1000))
    for mode in range(0o1000)
]


@pytest.mark.parametrize(
    ("root", "squash"),
    [
        (Root(0, 0, 0o755), Squash(NONE)),
        (Root(1000, 0, 0o755), Squash(ROOT, 1000, NOBODY_ID)),
        (Root(1000, 1001, 0o700), Squash(ROOT, 1000, 1001)),
        (Root(0, 1001, 0o775), Squash(ROOT, NOBODY_ID, 1001)),
        (Root(0, 0, 0o777), Squash(ROOT)),
        (Root(1000, 0, 0o555), Squash(NONE)),
    ],
)
def test_the_squash_matches_the_owner_of_the_root(root: Root, squash: Squash) -> None:
    assert fitting(root) == squash


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_with_what_fits_the_clients_root_can_store(kind: str) -> None:
    for root in ROOTS:
        squash = fitting(root, kind)
        assert squash.lets_root_store(root)
        assert squash.kind in (kind or ROOT, NONE)
        assert squash.kind == NONE or squash.uid != 0


def test_who_can_store_is_what_the_kernel_would_say() -> None:
    """By the rule of path_resolution(7), for each identity that a client can send."""
    identities = [(0, 0), (1000, 7), (7, 1000), (7, 7), (NOBODY_ID, NOBODY_ID), (7, 0)]
    for root, kind in itertools.product(ROOTS, KINDS):
        squash = Squash(kind)

        def seen(uid: int, gid: int, squash: Squash = squash) -> tuple[int, int]:
            anonymous = squash.kind == ALL or (squash.kind == ROOT and uid == 0)
            squashed_gid = squash.kind == ROOT and gid == 0
            return (
                squash.uid if anonymous else uid,
                squash.gid if anonymous or squashed_gid else gid,
            )

        def may(uid: int, gid: int, root: Root = root) -> bool:
            if uid == 0:
                return True
            bits = stat.S_IRWXU, stat.S_IRWXG, stat.S_IRWXO
            mine = bits[0] if uid == root.uid else bits[1] if gid == root.gid else bits[2]
            return root.mode & mine & 0o333 == mine & 0o333

        stores = {one: may(*seen(*one)) for one in identities}
        assert squash.lets_root_store(root) == stores[0, 0], (root, squash)
        assert squash.lets_somebody_store(root) == any(stores.values()), (root, squash)


def test_a_line_is_read_back_as_it_was_meant() -> None:
    squash = Squash(ROOT, 1000, 1001)
    options = options_of(squash, UUID)
    for path in ("/kv", "/a b", '/q"#\\(', "/n\nl", "/\udcff", "/ü"):
        line = export_line(path, ("10.0.0.0/24", "@hosts"), options)
        assert "\n" not in line
        (first, *_) = parse_exports(line, path)
        assert (first.path, first.client) == (path, "10.0.0.0/24")
        assert {"rw", "async", "no_subtree_check", "mp", f"fsid={UUID}"} <= first.options
        assert first.squash == squash
    assert "ro" in options_of(squash, UUID, is_writable=False).split(",")


@pytest.mark.parametrize("squash", [Squash(NONE), Squash(ROOT), Squash(ALL, 5, 6)])
def test_a_squash_is_read_back(squash: Squash) -> None:
    line = export_line("/kv", ("*",), options_of(squash, UUID))
    assert [one.squash for one in parse_exports(line, "/kv")] == [squash]


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("10.0.0.7/24", "10.0.0.0/24"),
        ("10.0.0.7/32", "10.0.0.7"),
        ("0.0.0.0/0", "*"),
        ("fd00::1/128", "fd00::1"),
        ("fd00::/64", "fd00::/64"),
        ("*", "*"),
        ("@hosts", "@hosts"),
        ("gpu-01.example.org", "gpu-01.example.org"),
        ("gpu*.example.org", "gpu*.example.org"),
    ],
)
def test_a_client_is_said_as_both_servers_take_it(said: str, taken: str) -> None:
    assert client_of(said) == taken


@pytest.mark.parametrize(
    "said", ["", "a b", "a(rw)", "-x", "#", '"a"', "10.0.0.0/40", "a/b", "a,b"]
)
def test_what_is_no_client_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match="is not a client"):
        client_of(said)


EXPORT: Final = GaneshaExport(7, '/k "v"\\', "/kv", "1.2", Squash(ROOT, 5, 6), True, 1)


@pytest.mark.parametrize("squash", [Squash(NONE), Squash(ROOT, 5, 6), Squash(ALL, 5, 6)])
@pytest.mark.parametrize("is_writable", [True, False])
def test_a_block_is_read_back_as_it_was_meant(squash: Squash, is_writable: bool) -> None:
    export = EXPORT._replace(squash=squash, is_writable=is_writable)
    blocks = parse(export_text(export, ("10.0.0.0/24", "@hosts"), FIT))
    assert exports_of(blocks) == (export,)
    assert cache_settings(blocks) == FIT
    (clients,) = [one for one in blocks[1].blocks if one.name == "client"]
    assert clients.values["clients"] == ("10.0.0.0/24", "@hosts")
    assert cache_settings(parse(export_text(export, ("*",), None))) is None


def test_a_block_asks_for_ports_of_root_and_for_nothing_that_a_build_may_lack() -> None:
    """RDMA stands in a comment: Debian's Ganesha refuses the whole block for the word."""
    (_, block) = parse(export_text(EXPORT, ("*",), FIT))
    assert block.text_of("privilegedport") == "true"
    assert block.values["transports"] == ("TCP",)
    assert "# TCP, RDMA" in export_text(EXPORT, ("*",), FIT)


def test_a_client_is_told_how_to_mount_it() -> None:
    plan = ExportPlan("/kv of\tmine", "nfsd", "/file", "", True, False, ())
    host = os.uname().nodename
    command = shlex.split(plan.client_mount)
    assert command[:4] == ["mount", "-t", "nfs", "-o"]
    assert command[4] == CLIENT_OPTIONS
    assert command[5:] == [f"{host}:/kv of\tmine", "/kv of\tmine"]
    fields = plan.client_fstab.split(" ")
    assert fields[:3] == [f"{host}:/kv\\040of\\011mine", "/kv\\040of\\011mine", "nfs"]
    assert fields[3:] == [f"{CLIENT_OPTIONS},_netdev", "0", "0"]
    page = (PROJECT / "docs" / "nfs.md").read_text()
    assert f"mount -t nfs -o {CLIENT_OPTIONS} server:/kv /kv" in page
    assert f"server:/kv /kv nfs {CLIENT_OPTIONS},_netdev 0 0" in page


def test_the_last_cache_block_counts_and_starts_from_the_defaults() -> None:
    text = "mdcache { fd_lwmark_percent = 0; LRU_Run_Interval=1; } # }\nCacheInode {NParts=7;}"
    assert cache_settings(parse(text)) == CacheSettings()
    assert cache_settings(parse(f"{text} MDCACHE {{ FD_LWMark_Percent = 0x0; }}")) == (0, 90)
    assert cache_settings(parse("EXPORT { Export_Id = 010; }")) is None
    assert exports_of(parse("EXPORT { Export_Id = 010; }"))[0].export_id == 8


def test_an_export_says_what_its_defaults_say() -> None:
    text = """
    EXPORT_DEFAULTS { Squash = none; Access_Type = RW; }
    EXPORT { Export_Id = 1; Path = /a; Pseudo = '/a b'; }
    EXPORT { Export_Id = 2; Path = /b; Squash = All_Squash; Anonymous_Uid = -2; Access_Type = RO;
             CLIENT { Clients = a, b; Access_Type = RO; } }
    EXPORT { Path = /c; Access_Type = None; CLIENT { Clients = *; Access_Type = rw; } }
    """
    one, two, three = exports_of(parse(text))
    assert one == GaneshaExport(1, "/a", "/a b", "", Squash(NONE), True)
    assert two.squash == Squash(ALL, 2**32 - 2, 2**32 - 2)
    assert (two.is_writable, three.is_writable) == (False, True)


@given(st.text(alphabet="ab={};,\"'#%\\ \n0*/", max_size=60))
def test_nothing_that_a_file_says_stops_the_reader(text: str) -> None:
    assert len(exports_of(parse(text))) <= len(text)
    assert cache_settings(parse(text)) is None
    assert all(kind in ("include", "dir", "url") for kind, _ in includes(text))


def test_includes_are_those_that_its_scanner_takes() -> None:
    text = '%include "/a.conf"\n  %dir b.d # why\n%url rados://x/y\n# %include /c\nA { b = "%"; }\n'
    assert includes(text) == [("include", "/a.conf"), ("dir", "b.d"), ("url", "rados://x/y")]


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["ganesha.nfsd"], "/etc/ganesha/ganesha.conf"),
        (["ganesha.nfsd", "-F", "-f", "/a"], "/a"),
        (["ganesha.nfsd", "-f/a", "-L", "b"], "/a"),
    ],
)
def test_the_command_line_names_the_configuration(words: list[str], config: str) -> None:
    assert config_of(words) == config


@example("0" * 28 + "ffff", frozenset())
@given(st.uuids(), st.frozensets(st.integers(0, 65_535), max_size=9))
def test_ids_are_a_pools_own_and_in_range(uuid: object, taken: frozenset[int]) -> None:
    export_id = export_id_of(str(uuid), taken)
    assert 1 <= export_id <= 65_535
    assert export_id not in taken
    assert export_id == export_id_of(str(uuid), taken - {export_id})
    numbers = re.fullmatch(r"(\d+)\.(\d+)", filesystem_id_of(str(uuid)))
    assert numbers
    # Filesystem_Id's scanner takes a leading zero for octal.
    assert all(one == str(int(one)) and int(one) < 2**64 - 1 for one in numbers.groups())


def test_two_pools_have_ids_of_their_own() -> None:
    one, other = own_fsid(UUID, "/a"), own_fsid(UUID[::-1], "/a")
    assert one == UUID
    assert filesystem_id_of(one) != filesystem_id_of(other)
    assert own_fsid("", "/a") != own_fsid("", "/b") != own_fsid(UUID, "/b", "/below")


def test_its_defaults_are_those_that_its_manual_says() -> None:
    """ganesha-cache-config(8); tests/fuse/commands/test_export.py asks a real server."""
    assert ganesha_config.CacheSettings() == (50, 90)


def test_of_a_configuration_so_much_is_read_and_the_rest_is_told(tmp_path: Path) -> None:
    """Whoever may write it may make it as long as he likes."""
    (tmp_path / "ganesha.conf").write_text("%include other.conf\n")
    (tmp_path / "other.conf").write_text("# a comment\n" * 200_000)
    found = ganesha.read_configuration(str(tmp_path / "ganesha.conf"))
    assert found.unread == f"{tmp_path}/other.conf: too long"
    assert len(found.text) < 2 << 20


def test_the_look_at_a_server_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a million files open; here this process stands for it."""
    moments_s = itertools.count(0.0, 0.5)
    name = os.path.basename(Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode())
    monkeypatch.setattr(ganesha, "GANESHA", name)
    monkeypatch.setattr(ganesha, "process_ids", lambda: [os.getpid()])
    monkeypatch.setattr(ganesha, "time", SimpleNamespace(monotonic=lambda: next(moments_s)))
    opened = [os.open("/", os.O_PATH) for _ in range(10)]
    (server,) = ganesha._running("/kv")
    assert server.unknown_files >= 7
    for fd in opened:
        os.close(fd)


def test_of_a_file_of_ours_so_much_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kv.exports"
    path.write_text(marked("x" * (1 << 20), "kv"))
    text = own_text(str(path), "kv")
    assert text is not None
    assert len(text) == 64 << 10
