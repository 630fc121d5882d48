"""What a test tells a server that is to die inside a request (kill_hook/sitecustomize.py)."""

import mmap
import os
from pathlib import Path
from typing import Final, Self

from tests.support.kills.kill_hook.sitecustomize import (
    AFTER_COMMIT,
    BEFORE_COMMIT,
    BEGIN,
    CREATE,
    END,
    FIRED,
    KIND,
    MOMENT,
    RELEASE,
    RENAME,
)

_FOLDER: Final = Path(__file__).parent / "kill_hook"
KINDS: Final = {"create": CREATE, "rename": RENAME, "release": RELEASE}
#: Before it has done anything; with its rows not yet and already in the index; with the reply made
#: and not yet written to the kernel.
MOMENTS: Final = {
    "begin": BEGIN,
    "before commit": BEFORE_COMMIT,
    "after commit": AFTER_COMMIT,
    "end": END,
}


class KillOrder:
    """The order file at *path*; servers started with ``prefix`` look there."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._path = path

    def prefix(self, installed: Path | None) -> list[str]:
        """Return what a kvfs command begins with whose server is to obey.

        *installed* is where its kvfs is, if that is not this tree.
        """
        folders = [str(_FOLDER)] if installed is None else [str(_FOLDER), str(installed)]
        if others := os.environ.get("PYTHONPATH"):
            folders.append(others)
        # Python looks in the working directory first.
        place = [] if installed is None else [f"--chdir={installed}"]
        order = f"KVFS_TEST_KILL_ORDER={self._path}"
        return ["env", *place, order, f"PYTHONPATH={os.pathsep.join(folders)}"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()

    def give(self, kind: str, moment: str) -> None:
        """Let the next such request be a server's last."""
        self._memory[FIRED] = 0
        self._memory[MOMENT] = MOMENTS[moment]
        self._memory[KIND] = KINDS[kind]

    def take_back(self) -> bool:
        """Let the next servers live; return whether one has died of the order."""
        self._memory[KIND] = 0
        return self._memory[FIRED] == 1
