"""A pool that exists during a demo, made and removed by the commands an operator would type."""

import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvfs.cli.demo_overfill import image_bytes
from kvfs.client.subprocesses import output_of, program_again, undisturbed
from kvfs.core.errors import CommandError, ServeFailed, SourceBlank, SourceFull, SourceMissing
from kvfs.core.sizes import format_size

#: Disks first. A container, whose disk is an overlay, has at least memory.
PLACES: Final = ("/var/tmp", "/tmp", "/dev/shm")
#: More capacity than data: ready extents (5 %), partly used blocks, and some reserve.
CAPACITY_FACTOR: Final = 1.25
CAPACITY_EXTRA_BYTES: Final = 256 << 20
#: For the index, and what the parent file system keeps for itself.
PLACE_EXTRA_BYTES: Final = 512 << 20


@contextmanager
def demo_pool(
    source: str | None, data_bytes: int, *, beside: bool, keep: bool, quiet: bool
) -> Iterator[Path]:
    """Yield the root of a new mount with space for *data_bytes*; unmount and remove it at the end.

    *beside*: its parent has room for the same data and for an XFS of the pool's size, too.
    *source* must be blank, and is blank again afterwards. Raises the error of a command that fails,
    and SourceFull if no place has enough space.
    """
    capacity_bytes = int(data_bytes * CAPACITY_FACTOR) + CAPACITY_EXTRA_BYTES
    more_bytes = PLACE_EXTRA_BYTES + (data_bytes + image_bytes(capacity_bytes) if beside else 0)
    directory, pool = _make(source, capacity_bytes, more_bytes, quiet=quiet)
    mountpoint = directory / "kv"
    try:
        mountpoint.mkdir()
        run_kvfs("mount", pool, str(mountpoint), quiet=quiet)
        if not quiet:
            _show_data_path(mountpoint)
        yield mountpoint
        _remove(directory, pool, keep=keep, quiet=quiet)
    except BaseException:
        # The operator must read why the load ended, even if the clean-up fails as well. If the
        # clean-up itself was interrupted, the rest of it is done now.
        try:
            with undisturbed():
                _remove(directory, pool, keep=keep, quiet=quiet)
        except CommandError as error:
            print(f"kvfs: {directory} is left behind: {error}", file=sys.stderr)
        raise
    if keep and not quiet:
        print(f"Kept: {pool} is mounted on {mountpoint}.")


def _make(
    source: str | None, capacity_bytes: int, more_bytes: int, *, quiet: bool
) -> tuple[Path, str]:
    """Return a directory for the mountpoint and the source of a fresh pool.

    The file system of the directory has room for *more_bytes* besides.
    """
    refused: CommandError = SourceFull(
        f"no room for {format_size(capacity_bytes)} in any of {', '.join(PLACES)}"
    )
    for place in PLACES:
        if source is None and not _has_room(place, capacity_bytes + more_bytes):
            continue
        directory = Path(tempfile.mkdtemp(prefix="kvfs-demo-", dir=place))
        try:
            pool = source or str(directory / "pool")
            if source is None:
                os.mkdir(pool)
            run_kvfs("mkfs", pool, "--capacity", f"{capacity_bytes >> 20}M", quiet=quiet)
        except CommandError as error:
            shutil.rmtree(directory)
            if source is not None:
                raise
            refused = error
            continue
        except BaseException:
            shutil.rmtree(directory)
            raise
        return directory, pool
    raise refused


def _remove(directory: Path, pool: str, *, keep: bool, quiet: bool) -> None:
    if keep:
        return
    if os.path.ismount(directory / "kv"):
        run_kvfs("umount", str(directory / "kv"), quiet=quiet)
    with contextlib.suppress(SourceBlank, SourceMissing):  # it was destroyed already
        run_kvfs("destroy", pool, "--yes", quiet=quiet)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


def _has_room(place: str, needed_bytes: int) -> bool:
    try:
        held = os.statvfs(place)
    except FileNotFoundError:
        return False
    return held.f_bavail * held.f_frsize >= needed_bytes


def _show_data_path(mountpoint: Path) -> None:
    status = json.loads(run_kvfs("status", str(mountpoint), "--json", quiet=True))
    tell(f"Data path: {status['data_path']}; {status['data_path_reason']}")


def tell(line: str) -> None:
    """Print *line*; if nobody can read it any more, the pool is to be removed all the same."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def run_kvfs(*arguments: str, quiet: bool) -> str:
    """Run a kvfs command and return what it printed; show it as typed unless *quiet*."""
    if not quiet:
        tell(f"$ kvfs {shlex.join(arguments)}")
    program, environment = program_again("kvfs.cli.main")
    done = output_of([*program, *arguments], environment)
    if done.returncode != 0:
        line = done.stderr.strip().removeprefix("kvfs: ")
        raise _error_of(done.returncode)(line or f"exit code {done.returncode}")
    return done.stdout


def _error_of(exit_code: int) -> type[CommandError]:
    """Return the error class of *exit_code*, so that the demo ends with the same code."""
    kinds = {kind.exit_code: kind for kind in CommandError.__subclasses__()}
    return kinds.get(exit_code, ServeFailed)
