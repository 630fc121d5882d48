"""``kvfs debug``: collect a support bundle, without block data."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from kvfs.cli.caller import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import NotMounted, UsageError
from kvfs.core.printable import printable
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers
    from kvfs.client.servers import ServerAnswer


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "debug",
        run,
        description="Collect what a report of a fault needs into a tar.gz: the status of the mount "
        "at MOUNT or of all mounts, what doctor finds,\nsettings, logs, lines of the kernel's log "
        "about drives and file systems, versions, the mount table, limits and memory.\nNo bytes of "
        "blocks. But names of files and directories are in status and logs, and a block's name is "
        "made from the hash of\na prompt: with --hash-names digests stand in their place (with a "
        "key that is kept nowhere). Host names and paths of\nthe machine stay. Look into it before "
        "you send it.",
        example="kvfs debug --hash-names\n  kvfs debug /kv --output /tmp/kv.tar.gz",
    )
    parser.add_argument("mountpoint", metavar="MOUNT", nargs="?")
    parser.add_argument("--output", metavar="FILE", help="default: kvfs-debug-TIME.tar.gz here")
    parser.add_argument("--hash-names", action="store_true", help="digests in place of names")


def run(args: argparse.Namespace) -> int:
    """Collect, write, and print what the bundle holds."""
    from kvfs.client.servers import mountpoint_behind
    from kvfs.client.support_bundle import parts_of, write_bundle
    from kvfs.core.hidden_names import HiddenNames, names_in

    need_root("kvfs debug")
    answers = _answers(args.mountpoint)
    mountpoints = {str(answer.status.get("mountpoint", "")) for answer in answers}
    mountpoints |= {mountpoint_behind(answer.path) for answer in answers}
    names = {name for answer in answers for name in names_in(answer.status)}
    hidden = HiddenNames(os.urandom(32), mountpoints, names) if args.hash_names else None
    parts = parts_of(answers)
    path = args.output or time.strftime("kvfs-debug-%Y%m%d-%H%M%S.tar.gz")
    with _new_file(path) as file:
        from rich.console import Console
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
        with bar:
            task = bar.add_task("collecting", total=len(parts))
            sizes = write_bundle(
                file, parts, hidden, lambda name: bar.update(task, advance=1, description=name)
            )
    for name, size_bytes in sizes:
        print(f"{format_size(size_bytes):>12}  {name}")
    said = "names of blocks, made from prompts' hashes, may be in it: --hash-names replaces them"
    if hidden:
        said = "digests stand for the names below the mounts"
    print(f"{format_size(os.stat(path).st_size):>12}  {printable(path)}: no block data; {said}")
    return 0


def _answers(mountpoint: str | None) -> list["ServerAnswer"]:
    """Return the answer of the server at *mountpoint*, or of all servers, dead ones included."""
    from kvfs.client.servers import answers_and_dead, mountpoint_behind
    from kvfs.machine.mount_table import resolve_mountpoint

    found = answers_and_dead()
    if not mountpoint:
        return found
    wanted = resolve_mountpoint(mountpoint)
    one = [
        answer
        for answer in found
        if wanted in (answer.status.get("mountpoint"), mountpoint_behind(answer.path))
    ]
    if not one:
        raise NotMounted(f"no kvfs is mounted at {wanted}; without MOUNT the machine is collected")
    return one


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[IO[bytes]]:
    """Yield a new file at *path* for root alone; removes it if the ``with`` fails."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name another file with --output") from None
    try:
        with open(fd, "wb") as file:
            yield file
    except BaseException:
        os.unlink(path)
        raise
