"""Running another program of this very kvfs, with this very interpreter."""

import os
import subprocess
import sys
import sysconfig
from typing import Final

import kvfs

#: A look at every process on a big machine takes a fraction of it.
_LOOK_MAX_S: Final = 3.0


def program_again(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs *module*, and the environment in which it is found.

    ``-P``: a root shell may stand in a directory with a module of somebody's called trio.
    """
    environment = dict(os.environ)
    home = os.path.dirname(os.path.dirname(os.path.abspath(kvfs.__file__)))
    if home != sysconfig.get_path("purelib"):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{others}" if others else home
    return [sys.executable, "-P", "-m", module], environment


def seen_in_time(module: str, mountpoint: str) -> list[bytes]:
    """Return the whole lines that *module*, which looks at who uses *mountpoint*, prints in 3 s.

    A look through every process can hang in one of them, and is a program of its own for that.
    """
    command, environment = program_again(module)
    try:
        done = subprocess.run(
            [*command, mountpoint],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_LOOK_MAX_S,
            check=False,
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").rpartition(b"\n")[0]
    return printed.splitlines()
