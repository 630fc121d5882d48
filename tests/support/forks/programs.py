"""Which command lines a fork of the parent can run as a new interpreter would, and which it cannot.

A fork has imported this tree with the interpreter, the flags and the locale that its parent was
started with. A command line that asks for anything else is left to exec.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[3]
SUPERVISOR: Final = str(ROOT / "mount" / "supervisor" / "__main__.py")
#: Modules that may have been imported before: a program that changes one first is none of these.
_PACKAGES: Final = ("kvfs.", "mount.")
#: Read by the interpreter, the C library or the loader at their start, and never again.
_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
_PATH: Final = "PYTHONPATH"
#: Of one message to the parent, and of the descriptors with it (unix(7), SCM_MAX_FD).
MESSAGE_MAX_BYTES: Final = 128 * 1024
FDS_MAX: Final = 200
#: What the parent says first: it forks from now on; it cannot, on this kernel.
READY: Final = b"ready"
CANNOT: Final = b"cannot"


class Program(NamedTuple):
    """What an interpreter of this tree runs: one of *module*, *file* and *code*, the others ""."""

    words: tuple[str, ...]
    """The whole command line."""
    arguments: tuple[str, ...]
    module: str = ""
    file: str = ""
    code: str = ""


def program_of(words: Sequence[str], directory: str) -> Program | None:
    """Return what the command line *words* runs in *directory*; None: nothing of this tree.

    Without ``-P`` Python looks in the directory first, where another tree may lie, or somebody's
    module called trio.
    """
    if not words or words[0] != sys.executable:
        return None
    whole = tuple(words)
    match whole[1:]:
        case ("-P", "-m", module, *arguments) if module.startswith(_PACKAGES):
            return Program(whole, tuple(arguments), module=module)
        case ("-m", module, *arguments) if module.startswith(_PACKAGES) and directory == str(ROOT):
            return Program(whole, tuple(arguments), module=module)
        case ("-I", "-S", file, *arguments) if file == SUPERVISOR:
            return Program(whole, tuple(arguments), file=file)
    return None


def program_of_tests(words: Sequence[str], directory: str) -> Program | None:
    """Return that, or one that a test brings: a module of tests/support, or ``-c`` with its code.

    Who starts such code by a fork knows that it does not change what is imported already.
    """
    whole = tuple(words)
    match whole:
        case (sys.executable, "-m", module, *arguments) if module.startswith("tests.support."):
            if directory == str(ROOT):
                return Program(whole, tuple(arguments), module=module)
        case (sys.executable, "-c", code, *arguments):
            return Program(whole, tuple(arguments), code=code)
    return program_of(words, directory)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of *environment* an interpreter heeds when it starts, and a fork would not.

    This tree is found with and without its place in PYTHONPATH.
    """
    heeded = {name: text for name, text in environment.items() if name.startswith(_READ_AT_START)}
    others = [place for place in heeded.pop(_PATH, "").split(os.pathsep) if place]
    if others := [place for place in others if place != str(ROOT)]:
        heeded[_PATH] = os.pathsep.join(others)
    return heeded


#: Of /proc/PID/status (proc(5)).
_STANDING_LINES: Final = (
    *("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:"),
    *("SigBlk:", "SigIgn:", "Cpus_allowed_list:"),
)
_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "user", "uts")


def standing() -> tuple[str, ...]:
    """Return what a new process has from who starts it, and no argument of Popen says.

    Its ids, capabilities, masks of signals and CPUs, limits, namespaces, cgroup, root and priority.
    """
    here = Path("/proc/thread-self")
    lines = (here / "status").read_text().splitlines()
    return (
        *(_but_sigio(line) for line in lines if line.startswith(_STANDING_LINES)),
        *((here / name).read_text() for name in ("limits", "cgroup", "oom_score_adj")),
        *(os.readlink(here / "ns" / name) for name in _NAMESPACES),
        os.readlink(here / "root"),
        str(os.getpriority(os.PRIO_PROCESS, 0)),
    )


def _but_sigio(line: str) -> str:
    """Return *line* as if SIGIO was not ignored: a process that makes ``Extents`` ignores it.

    What it starts does so, too, when it makes some.
    """
    name, _, mask = line.partition(":")
    if name != "SigIgn":
        return line
    return f"{name}:{int(mask, 16) & ~(1 << signal.SIGIO - 1):x}"
