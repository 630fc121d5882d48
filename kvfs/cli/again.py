"""Running another program of this very kvfs, with this very interpreter."""

import os
import sys
import sysconfig

import kvfs


def program_again(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs *module*, and the environment in which it is found.

    ``-P``: a root shell may stand in a directory where somebody left a ``trio.py``.
    """
    environment = dict(os.environ)
    home = os.path.dirname(os.path.dirname(os.path.abspath(kvfs.__file__)))
    if home != sysconfig.get_path("purelib"):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{others}" if others else home
    return [sys.executable, "-P", "-m", module], environment
