"""The kernel's NFS server on this machine: whether it runs, and its exports.

exports(5) writes them, exportfs(8) shows them.
"""

import glob
import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.client.nfs.squash import ALL, NOBODY_ID, NONE, ROOT, Squash

EXPORTS: Final = "/etc/exports"
EXPORTS_DIRECTORY: Final = "/etc/exports.d"
#: The exports that exportfs(8) gave to the kernel's NFS server, with every option.
ETAB: Final = "/var/lib/nfs/etab"
#: The exports that the kernel uses now (nfsd(7)); all but the first need no mount of their own. The
#: last is of the host's network: a unit may have one of its own.
_TAKEN: Final = (
    "/proc/fs/nfsd/exports",
    "/proc/net/rpc/nfsd.export/content",
    "/proc/1/net/rpc/nfsd.export/content",
)
#: Closes what NFSv4 clients keep open after the export has ended (nfsd(7)).
UNLOCK: Final = "/proc/fs/nfsd/unlock_filesystem"
#: Its figures, if the module is loaded; ``th THREADS ...`` (fs/nfsd/stats.c).
_FIGURES: Final = "/proc/net/rpc/nfsd"
_CONTINUED: Final = re.compile(r"\\\n")
#: A line of the NFS server's table of exports: ``PATH<TAB>CLIENT(OPTION,...)``.
_LINE: Final = re.compile(r"(?P<path>\S+)\s+(?P<client>[^\s(]+)\((?P<options>[^)]*)\)")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
#: Bytes that need no escape in an exports file.
_PLAIN: Final = re.compile(rb"[A-Za-z0-9/._+,:@%=~-]")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
#: async: a lost block is a miss, so clients need not wait until bytes are durable.
#: no_subtree_check: otherwise a handle names its directory, and is stale after a rename to another.
#: mp: while nothing is mounted there, nfsd must not serve the directory below.
_OPTIONS: Final = ("async", "no_subtree_check", "mp")
_KIND_OPTIONS: Final = {ROOT: "root_squash", ALL: "all_squash", NONE: "no_root_squash"}


class Export(NamedTuple):
    """One line of the kernel NFS server's table (exports(5))."""

    path: str
    client: str
    options: frozenset[str]
    same_fsid: tuple[str, ...] = ()
    """Other exported paths with the same fsid=."""

    @property
    def squash(self) -> Squash:
        """Which users the server maps the users of clients to."""
        uid, gid = (self._number(f"{name}=") for name in ("anonuid", "anongid"))
        if "all_squash" in self.options:
            return Squash(ALL, uid, gid)
        return Squash(NONE) if "no_root_squash" in self.options else Squash(ROOT, uid, gid)

    def _number(self, name: str) -> int:
        said = [option.removeprefix(name) for option in self.options if option.startswith(name)]
        return int(said[0]) if said and said[0].isdigit() else NOBODY_ID


def nfsd_runs() -> bool:
    """Whether the kernel's NFS server has threads."""
    return any(
        fields[0] == "th" and fields[1] != "0"
        for fields in map(str.split, _text(_FIGURES).splitlines())
        if len(fields) > 1
    )


def told_exports(mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint*, and of what lies below it, as exportfs(8) lists them.

    Empty if the kernel's NFS server is not installed. Raises OSError.
    """
    try:
        with open(ETAB, encoding="utf-8", errors="surrogateescape") as file:
            return parse_exports(file.read(), mountpoint)
    except FileNotFoundError:
        return ()


def taken_exports(mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint*, and of what lies below it, that the kernel uses."""
    return tuple(one for path in _TAKEN for one in parse_exports(_text(path), mountpoint))


def way_out(mountpoint: str, taken: tuple[Export, ...]) -> str:
    """Return, as text, the commands that make the NFS server let go of *mountpoint*."""
    # The kernel shows clients by resolved address; exportfs needs them as they were given.
    told = dict.fromkeys(parse_exports(_text(ETAB), mountpoint) or taken)
    ends = " && ".join(
        dict.fromkeys(f"exportfs -u {shlex.quote(f'{one.client}:{one.path}')}" for one in told)
    )
    return (
        f"`{ends}` ends that, and `echo {shlex.quote(mountpoint)} > {UNLOCK}` for files that "
        "clients have open"
    )


def exported_by(mountpoint: str, but: str) -> Iterator[str]:
    """Yield the files of exports(5), except the file *but*, that export *mountpoint* itself."""
    wanted = os.fsencode(mountpoint)
    for path in (EXPORTS, *sorted(glob.glob(f"{EXPORTS_DIRECTORY}/*.exports"))):
        hidden = os.path.basename(path).startswith(".")
        if path != but and not hidden and wanted in _paths_in(_text(path)):
            yield path


def _paths_in(text: str) -> Iterator[bytes]:
    """Yield the paths that an exports file exports."""
    for line in _CONTINUED.sub(" ", text).splitlines():
        found = re.match(r'\s*(?:"([^"]*)"|([^\s"#]+))', line)
        if found is not None:
            raw = os.fsencode(found[1] if found[1] is not None else found[2])
            yield re.sub(rb"\\([0-7]{3})", lambda one: bytes([int(one[1], 8)]), raw).rstrip(b"/")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def parse_exports(text: str, mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint* and of what lies below it."""
    everything = list(_exports(text))
    paths_of: dict[str, set[str]] = {}
    for export in everything:
        if fsid := fsid_of(export):
            paths_of.setdefault(fsid, set()).add(export.path)
    return tuple(
        export._replace(
            same_fsid=tuple(sorted(paths_of.get(fsid_of(export), set()) - {export.path}))
        )
        for export in everything
        if export.path == mountpoint or export.path.startswith(f"{mountpoint}/")
    )


def fsid_of(export: Export) -> str:
    """Return the fsid= of *export*, "" if it has none."""
    return next((one for one in sorted(export.options) if one.startswith("fsid=")), "")


def _exports(text: str) -> Iterator[Export]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            octal = match["path"].encode(errors="surrogateescape").decode("latin-1")
            raw = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), octal).encode("latin-1")
            path = raw.decode(errors="surrogateescape")
            yield Export(path, match["client"], frozenset(match["options"].split(",")))


def own_fsid(pool: str, source: str, below: str = "") -> str:
    """Return an fsid= that no other export has, the same each time (exports(5)).

    It is the UUID of the *pool*; for a directory *below* the root it is made from that and its
    path. A pool without a UUID is identified by its *source*.
    """
    if _UUID.fullmatch(pool) and not below:
        return pool
    named = f"{pool or source}{below}".encode(errors="backslashreplace")
    digits = hashlib.sha256(named).hexdigest()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def options_of(squash: Squash, fsid: str, *, is_writable: bool = True) -> str:
    """Return the options of an export that keeps kvfs's promises, as exports(5) takes them."""
    options = ["rw" if is_writable else "ro", *_OPTIONS, _KIND_OPTIONS[squash.kind]]
    if squash.kind != NONE and (squash.uid, squash.gid) != (NOBODY_ID, NOBODY_ID):
        options += [f"anonuid={squash.uid}", f"anongid={squash.gid}"]
    return ",".join([*options, f"fsid={fsid}"])


def export_line(path: str, clients: tuple[str, ...], options: str) -> str:
    """Return the line of an exports file that exports *path* to *clients*."""
    raw = path.encode(errors="surrogateescape")
    escaped = "".join(chr(byte) if _PLAIN.match(bytes([byte])) else f"\\{byte:03o}" for byte in raw)
    return " ".join([escaped, *(f"{client}({options})" for client in clients)])
