"""``kvfs debug``: collect a support bundle, texts about kvfs and its machine, without block data.

Each part is made on its own, in bounded time and size. One that cannot be made says why in its
place.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import kvfs
from kvfs.cli.failures import need_root
from kvfs.cli.follow import ProgressBar, progress_bar
from kvfs.cli.parser import add_verb
from kvfs.client.servers import ServerAnswer, answers_and_dead, mountpoint_behind
from kvfs.client.subprocesses import program_again
from kvfs.core.errors import NotMounted, UsageError
from kvfs.core.mount_name import config_path, log_path
from kvfs.core.shown_names import HiddenNames, names_in, printable
from kvfs.core.sizes import format_size
from kvfs.machine.mount_table import resolve_mountpoint

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


#: The end of a longer part is kept.
_PART_MAX_BYTES: Final = 4 << 20
_COMMAND_MAX_S: Final = 30.0
_JOURNAL_LINES: Final = "5000"
_PACKAGES: Final = ("pyfuse3", "trio", "lmdb", "numpy", "rich", "prometheus_client")
_OF_KERNEL: Final = re.compile(
    r"kvfs|fuse|xfs|nvme|loop\d|\bmd\d|I/O error|blk_update|out of memory|oom|blocked for more",
    re.IGNORECASE,
)


class Part(NamedTuple):
    """One file of the bundle."""

    name: str
    make: Callable[[], str]


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
    need_root("kvfs debug")
    answers = _answers(args.mountpoint)
    mountpoints = {str(answer.status.get("mountpoint", "")) for answer in answers}
    mountpoints |= {mountpoint_behind(answer.path) for answer in answers}
    names = {name for answer in answers for name in names_in(answer.status)}
    hidden = HiddenNames(os.urandom(32), mountpoints, names) if args.hash_names else None
    parts = parts_of(answers)
    path = args.output or time.strftime("kvfs-debug-%Y%m%d-%H%M%S.tar.gz")
    with _new_file(path) as file, progress_bar("collecting", counted=True) as show:
        sizes = write_bundle(file, parts, hidden, show)
    for name, size_bytes in sizes:
        print(f"{format_size(size_bytes):>12}  {name}")
    said = "names of blocks, made from prompts' hashes, may be in it: --hash-names replaces them"
    if hidden:
        said = "digests stand for the names below the mounts"
    print(f"{format_size(os.stat(path).st_size):>12}  {printable(path)}: no block data; {said}")
    return 0


def _answers(mountpoint: str | None) -> list[ServerAnswer]:
    """Return the answer of the server at *mountpoint*, or of all servers, dead ones included."""
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


def parts_of(answers: list[ServerAnswer]) -> list[Part]:
    """Return the parts about the machine, and about the server behind each of *answers*."""
    parts = [
        Part("versions.txt", _versions),
        Part("mounts.txt", lambda: _file("/proc/self/mountinfo")),
        Part("memory.txt", lambda: _file("/proc/meminfo") + _file("/proc/loadavg")),
        Part("drives.txt", _drives),
        Part("kernel.txt", _kernel_lines),
        Part("journal.txt", _journal),
    ]
    for answer in answers:
        parts += _of_server(answer)
    return parts


def _of_server(answer: ServerAnswer) -> Iterator[Part]:
    name = os.path.basename(answer.path).rpartition(".")[0]
    status = answer.status
    why = str(answer.error) if answer.error is not None else ""
    pid = int(status.get("server_pid", 0))
    yield Part(f"{name}/status.json", lambda: json.dumps(status, indent=2) if status else why)
    yield Part(f"{name}/settings.toml", lambda: _file(config_path(name)))
    yield Part(f"{name}/log.txt", lambda: _file(_log_of(pid, name)))
    if status:
        mountpoint = str(status["mountpoint"])
        yield Part(f"{name}/doctor.json", lambda: _kvfs("doctor", mountpoint, "--json"))
        yield Part(f"{name}/process.txt", lambda: _process(pid))


def write_bundle(
    file: IO[bytes], parts: list[Part], hidden: HiddenNames | None, show: ProgressBar
) -> list[tuple[str, int]]:
    """Write *parts* into *file* as a tar.gz; return names and sizes. *show* gets each name."""
    sizes: list[tuple[str, int]] = []
    with tarfile.open(fileobj=file, mode="w:gz") as bundle:
        for part in parts:
            text = _made(part)
            if hidden is not None:
                text = hidden.in_text(text)
            raw = text.encode(errors="backslashreplace")
            info = tarfile.TarInfo(f"kvfs-debug/{part.name}")
            info.size, info.mtime, info.mode = len(raw), int(time.time()), 0o600
            bundle.addfile(info, io.BytesIO(raw))
            sizes.append((part.name, len(raw)))
            show(len(sizes), len(parts), part.name)
    return sizes


def _made(part: Part) -> str:
    try:
        return part.make()[-_PART_MAX_BYTES:]
    except Exception as error:  # the bundle is for what goes wrong, here too
        return f"could not be collected: {type(error).__name__}: {error}\n"


def _versions() -> str:
    lines = [f"kvfs {kvfs.__version__}", f"Python {sys.version}", f"Linux {platform.release()}"]
    lines += [platform.machine(), f"{os.cpu_count()} CPUs"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package}: no metadata")
    lines += [_run("mkfs.xfs", "-V"), _run("fusermount3", "-V"), _file("/etc/os-release")]
    return "\n".join(lines)


def _drives() -> str:
    columns = "NAME,SIZE,TYPE,ROTA,SCHED,RA,MODEL,FSTYPE,MOUNTPOINTS"
    return _run("lsblk", "--output", columns) + _run("df", "--human-readable", "--local")


def _kernel_lines() -> str:
    lines = _run("dmesg", "--ctime").splitlines()
    return "\n".join(line for line in lines if _OF_KERNEL.search(line)) + "\n"


def _journal() -> str:
    return _run("journalctl", "--no-pager", "--lines", _JOURNAL_LINES, "--identifier", "kvfs")


def _log_of(pid: int, name: str) -> str:
    """Return the log file of server *pid*: the one on its command line, or the usual one."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError:
        words = []
    for at, word in enumerate(words):
        if word == "--log-file":
            return words[at + 1]
        if word.startswith("--log-file="):
            return word.partition("=")[2]
    return log_path(name)


def _process(pid: int) -> str:
    named = ("cmdline", "status", "limits", "cgroup", "oom_score_adj", "smaps_rollup")
    texts = (f"== {name}\n{_file(f'/proc/{pid}/{name}')}" for name in named)
    return "\n".join(texts).replace("\0", " ")


def _file(path: str) -> str:
    """Return the end of the file at *path*, or why there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _PART_MAX_BYTES))
            return file.read(_PART_MAX_BYTES).decode(errors="backslashreplace")
    except OSError as error:
        return f"{path}: {error.strerror}\n"


def _kvfs(*words: str) -> str:
    command, environment = program_again("kvfs.cli.main")
    return _run(*command, *words, environment=environment)


def _run(*words: str, environment: dict[str, str] | None = None) -> str:
    """Return what a program printed, or why it did not."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=_COMMAND_MAX_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {error}\n"
    return done.stdout.decode(errors="backslashreplace")
