"""Arguments that several verbs share: numbers, a pool's SOURCE, PATHs on a mount, a pattern."""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvfs.client.servers import answer_of, status_of
from kvfs.core.encryption import Encryption, parse_encryption
from kvfs.core.errors import NotMounted, PathMissing, SourceBlank, SourceForeign, UsageError
from kvfs.core.sizes import parse_size
from kvfs.core.source_list import is_by_uuid, listed, sources_of
from kvfs.machine.mount_table import FS_TYPE, kvfs_at, mount_of, mounts, resolve_mountpoint

#: The FILE that stands for standard output.
TO_OUTPUT: Final = "-"


def size_of(text: str | None, flag: str) -> int | None:
    """Return the bytes of the flag's *text*. Raises UsageError if it is not a positive size."""
    if text is None:
        return None
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if size_bytes == 0:
        raise UsageError(f"{flag} must be greater than 0")
    return size_bytes


def words_of(text: str) -> list[str]:
    """Return the parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def positive_of(text: str, flag: str) -> float:
    """Return the flag's *text* as a number. Raises UsageError if it is not greater than 0."""
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise UsageError(f"{flag} must be greater than 0")
    return number


def percent_of(text: str, flag: str) -> float:
    """Return the flag's *text*, with or without %, as percent. Raises UsageError."""
    percent = positive_of(text.strip().removesuffix("%"), flag)
    if percent > 100:
        raise UsageError(f"{flag} must be at most 100 %")
    return percent


def shares_of(text: str, flag: str) -> list[float]:
    """Return a list of percents, which is not empty. Raises UsageError."""
    shares = [percent_of(each, flag) for each in words_of(text)]
    if not shares:
        raise UsageError(f"{flag}: give at least one")
    return shares


def seconds_to(most_s: float) -> Callable[[str], float]:
    """Return the type of a flag that takes seconds, from 0 to *most_s*."""

    def seconds(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = -1
        if not 0 <= found <= most_s:  # also refuses nan
            raise argparse.ArgumentTypeError(f"must be between 0 and {most_s:g} seconds")
        return found

    return seconds


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the SOURCEs of a pool that is not mounted (``source_of``)."""
    parser.add_argument("sources", metavar="SOURCE", nargs="+")


def add_encrypt(parser: argparse.ArgumentParser) -> None:
    """Add how a pool is encrypted (``encryption_of``)."""
    parser.add_argument(
        "--encrypt",
        metavar="HOW",
        help="ephemeral (the key is gone with the next boot), key-file=FILE or tpm; needs "
        "cryptsetup",
    )


def absolute_key_file(how: str | None, directory: str = "") -> str | None:
    """Return the flag *how* with the path of its key file from *directory* on, if it has one."""
    name, equals, path = (how or "").partition("=")
    if not path:
        return how
    return f"{name}{equals}{os.path.abspath(os.path.join(directory, path))}"


def encryption_of(how: str | None) -> Encryption | None:
    """Return what the flag --encrypt asks for. Raises UsageError."""
    try:
        return parse_encryption(absolute_key_file(how) or "")
    except ValueError as error:
        raise UsageError(f"--encrypt: {error}") from None


def source_of(given: Sequence[str]) -> str:
    """Return the SOURCEs *given* as one text, which ``sources_of`` splits again."""
    return given[0] if len(given) == 1 else listed(absolute_sources(given))


def absolute_sources(given: Iterable[str], directory: str = "") -> list[str]:
    """Return the absolute path of each of the SOURCEs *given*, which may be lists of several.

    *directory* is where relative ones begin; empty for the present directory. A UUID stays one.
    """
    each = (one for source in given for one in sources_of(source))
    return [
        os.path.abspath(os.path.join(directory, one)) if one and not is_by_uuid(one) else one
        for one in each
    ]


@contextmanager
def wanted_pool(source: str) -> Iterator[None]:
    """Inside the ``with``, have errors about a *source* that is not a pool say what it is.

    It may list the drives of one. Raises SourceForeign, SourceBlank. A mountpoint is recognised by
    the mount table alone, because its server may hang.
    """
    for one in sources_of(source):
        mount = kvfs_at(resolve_mountpoint(one))
        if mount is not None:
            raise SourceForeign(
                f"{one} is a mountpoint, not a pool: give the source of the mount, {mount.source}"
            )
    try:
        yield
    except (SourceBlank, SourceForeign) as error:
        raise type(error)(error.found) from None


class OnMount(NamedTuple):
    """Paths on one mount."""

    mountpoint: str
    socket: str
    paths: tuple[str, ...]
    """Relative to the mountpoint; "" is the mountpoint itself."""


def locate(paths: Sequence[str]) -> OnMount:
    """Return the mount of *paths*, and the paths in it. Raises NotMounted, UsageError."""
    places = _Places()
    found = [places.of(path) for path in paths]
    mountpoints = {mountpoint for mountpoint, _ in found}
    if len(mountpoints) != 1:
        raise UsageError(f"all PATHs must be on the same mount: {', '.join(sorted(mountpoints))}")
    (mountpoint,) = mountpoints
    status_of(mountpoint)  # its error says what is wrong with a server that does not answer
    answer = answer_of(mountpoint)
    if answer is None:
        raise NotMounted(f"the server of {mountpoint} has just stopped")
    return OnMount(mountpoint, answer.path, tuple(below for _, below in found))


def add_match(parser: argparse.ArgumentParser) -> None:
    """Add the flag --match."""
    parser.add_argument(
        "--match",
        metavar="PATTERN",
        help="only what matches at or below PATH, as if it had been named; relative to the mount, "
        "quoted: * ? [...] within a name, ** for any directories",
    )


def nothing_matches(args: argparse.Namespace) -> PathMissing:
    """Return the error for a pattern that matches nothing."""
    return PathMissing(
        f"nothing at or below {', '.join(args.paths)} matches {args.match!r}: a pattern is "
        "relative to the mount, and * does not cross a /"
    )


class _Places:
    """Finds the mounts of thousands of paths fast, because most share a directory."""

    def __init__(self) -> None:
        self._mountpoints = {mount.mountpoint for mount in mounts()}
        self._directories: dict[str, tuple[str, str]] = {}

    def of(self, path: str) -> tuple[str, str]:
        """Return the mountpoint of *path* and its path below that. Raises NotMounted."""
        directory, name = os.path.split(os.path.abspath(path))
        if directory not in self._directories:
            try:
                self._directories[directory] = below_mount(directory)
            except NotMounted:
                return below_mount(path)
        mountpoint, below = self._directories[directory]
        # Symlinks inside a mount are not resolved, so only the name is to be added.
        below = f"{below}/{name}".strip("/")
        if f"{mountpoint}/{below}" in self._mountpoints:  # another mount lies there
            return below_mount(path)
        return mountpoint, below


def below_mount(path: str) -> tuple[str, str]:
    """Return the mountpoint of *path* and its path below that. Raises NotMounted."""
    absolute = resolve_mountpoint(path)
    mount = mount_of(absolute)
    if mount is not None and mount.fs_type == FS_TYPE:
        return mount.mountpoint, absolute[len(mount.mountpoint) :].strip("/")
    raise NotMounted(f"{path} is not on a kvfs mount")
