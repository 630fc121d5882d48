"""What a support bundle holds: texts about kvfs and its machine, never a block's bytes.

Each part is made on its own, in bounded time and size. One that cannot be made says why in its
place.
"""

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
from typing import IO, Final, NamedTuple

import kvfs
from kvfs.client.servers import ServerAnswer
from kvfs.client.subprocesses import program_again
from kvfs.core.hidden_names import HiddenNames
from kvfs.core.mount_name import config_path, log_path

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
    file: IO[bytes], parts: list[Part], hidden: HiddenNames | None, done: Callable[[str], None]
) -> list[tuple[str, int]]:
    """Write *parts* into *file* as a tar.gz; return names and sizes. *done* gets each name."""
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
            done(part.name)
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
