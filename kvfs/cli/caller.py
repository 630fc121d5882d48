"""Who runs the command."""

import os

from kvfs.errors import NotRoot


def need_root(what: str) -> None:
    """Raise NotRoot unless the command runs as root."""
    if os.geteuid() != 0:
        raise NotRoot(f"{what} needs root")
