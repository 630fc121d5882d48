"""``kvfs install``: put the unit, man pages and the like where this machine looks for them.

`pip` puts them below the prefix that kvfs itself is installed in. That may be a virtual
environment, in which neither systemd nor mount(8) looks.
"""

import argparse
import importlib.metadata
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import ToolMissing, UsageError

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_DISTRIBUTION: Final = "kvfs"
#: mount(8) looks nowhere else (its --enable-fs-paths-default).
_HELPERS: Final = Path("/sbin")
_HELPER_NAMES: Final = {
    "mount.kvfs": "mount.kvfs",
    "mount.fuse.kvfs": "mount.kvfs",
    "umount.kvfs": "umount.kvfs",
    "umount.fuse.kvfs": "umount.kvfs",
}
_LOGROTATE: Final = Path("/etc/logrotate.d/kvfs")
_LOGROTATE_FROM: Final = "share/kvfs/logrotate"


class Piece(NamedTuple):
    """One file of kvfs, and where it belongs."""

    source: Path
    place: Path
    is_link: bool
    """A command stays where it is, and *place* leads to it."""


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "install",
        run,
        description="After `pip install`, put the systemd unit, man pages, completion and docs "
        "below PREFIX,\nmount.kvfs for mount(8) and fstab into /sbin, and the logrotate file into "
        "/etc/logrotate.d. Run it again after an\nupgrade; --remove takes all of it away. The "
        "Debian package needs none of this.",
        example="kvfs install && systemctl daemon-reload",
    )
    parser.add_argument(
        "--prefix", metavar="DIR", default="/usr/local", help="default: %(default)s"
    )
    parser.add_argument("--remove", action="store_true", help="remove what it installed")
    parser.add_argument("--dry-run", action="store_true", help="change nothing; show the places")


def run(args: argparse.Namespace) -> int:
    """Install or remove each piece, and print its place."""
    if not args.dry_run:
        need_root("kvfs install")
    if not os.path.isabs(args.prefix):
        raise UsageError(f"--prefix {args.prefix}: give an absolute path")
    pieces = list(_pieces(Path(args.prefix)))
    if foreign := [str(piece.place) for piece in pieces if _is_foreign(piece)]:
        raise UsageError(
            f"{foreign[0]} was not made by `kvfs install`: remove the package that owns it first"
        )
    for piece in pieces:
        if args.remove:
            shown = _removed(piece, dry_run=args.dry_run)
        else:
            shown = _installed(piece, dry_run=args.dry_run)
        if shown:
            print(shown)
    return 0


def _pieces(prefix: Path) -> Iterator[Piece]:
    """Yield every piece that is not in its place already. Raises ToolMissing."""
    scripts = Path(sysconfig.get_path("scripts"))
    data = Path(sysconfig.get_path("data"))
    shipped = list(_shipped(data))
    if not shipped:
        raise ToolMissing(
            "this kvfs came without its files: the Debian package has put them in their places, "
            "and a tree that runs in place (pip install -e) has none; install the wheel"
        )
    for name in shipped:
        if name == _LOGROTATE_FROM:
            yield Piece(data / name, _LOGROTATE, is_link=False)
        elif data.resolve() != prefix.resolve():
            yield Piece(data / name, prefix / name, is_link=False)
    if scripts.resolve() != (prefix / "bin").resolve():
        yield Piece(scripts / "kvfs", prefix / "bin" / "kvfs", is_link=True)
    for name, command in _HELPER_NAMES.items():
        yield Piece(scripts / command, _HELPERS / name, is_link=True)


def _shipped(data: Path) -> Iterator[str]:
    """Yield the data files of the wheel, by their place below *data*."""
    for file in importlib.metadata.files(_DISTRIBUTION) or ():
        path = Path(os.path.normpath(file.locate()))
        if path.is_relative_to(data):
            name = path.relative_to(data)
            if name.parts[0] in ("share", "etc") or name.parts[:2] == ("lib", "systemd"):
                yield str(name)


def _is_foreign(piece: Piece) -> bool:
    """Whether somebody else's file is in the way: a command that is not a link, as dpkg's is."""
    if piece.is_link:
        return piece.place.exists() and not piece.place.is_symlink()
    return False


def _installed(piece: Piece, *, dry_run: bool) -> str:
    if piece.place == _LOGROTATE and piece.place.exists() and not _is_same(piece):
        return f"{piece.place} stays as it is: it has been changed"
    if dry_run:
        return f"{piece.place}{f' -> {piece.source}' if piece.is_link else ''}"
    piece.place.parent.mkdir(parents=True, exist_ok=True)
    if piece.is_link:
        piece.place.unlink(missing_ok=True)
        piece.place.symlink_to(piece.source)
        return f"{piece.place} -> {piece.source}"
    shutil.copyfile(piece.source, piece.place)
    piece.place.chmod(0o644)
    return str(piece.place)


def _removed(piece: Piece, *, dry_run: bool) -> str:
    """Remove the piece if it is ours; return a line. Folders and changed files stay."""
    if piece.is_link:
        if not piece.place.is_symlink() or piece.place.readlink() != piece.source:
            return ""
    elif not piece.place.exists():
        return ""
    elif piece.place == _LOGROTATE and not _is_same(piece):
        return f"{piece.place} stays: it has been changed"
    if not dry_run:
        piece.place.unlink()
    return f"removed {piece.place}"


def _is_same(piece: Piece) -> bool:
    return piece.place.read_bytes() == piece.source.read_bytes()
