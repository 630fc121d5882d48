"""A bare root file system of Debian, in which commands are run as an operator would type them.

It has this machine's network and devices, and processes and mounts of its own: what is mounted or
started there is gone with it. Unlike ``BareDebian`` nothing boots: there is no systemd.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Before and behind what each command prints.
_MARK: Final = "== step"
_RUN: Final = """\
set -eu
cd {root}
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs tmpfs run
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8 \\
    DEBIAN_FRONTEND=noninteractive chroot . sh /srv/steps
"""


class BareRoot:
    """A minimal *suite* of Debian below *place*, with *files* in its /srv."""

    def __init__(self, place: Path, suite: str, files: Sequence[Path]) -> None:
        self._root = place / suite
        made = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", suite, str(self._root)]
        done = subprocess.run(made, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for name in ("resolv.conf", "hosts"):
            shutil.copy(f"/etc/{name}", self._root / "etc" / name)
        for file in files:
            shutil.copy(file, self._root / "srv")

    def run(self, steps: Sequence[str], wait_s: float) -> list[str]:
        """Run *steps* in /srv one after another, until one fails; return what each printed."""
        script = ["cd /srv"]
        for step in steps:
            # As a shell that somebody types into: a file, and what it says in one stream.
            script += [f"echo '{_MARK}'", f"{{ {step}\n}} </dev/null 2>&1 || exit 1"]
        (self._root / "srv" / "steps").write_text("\n".join([*script, f"echo '{_MARK}'", ""]))
        command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork"]
        done = subprocess.run(
            [*command, "--kill-child=KILL", "sh", "-c", _RUN.format(root=self._root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=wait_s,
            check=False,
        )
        said = [part.strip("\n") for part in done.stdout.split(f"{_MARK}\n")][1:]
        assert done.returncode == 0, f"{steps[len(said) - 1]}\n{done.stdout[-4000:]}"
        assert len(said) == len(steps) + 1
        return said[:-1]

    def has(self, path: str) -> bool:
        """Whether *path* is there."""
        return os.path.lexists(self._root / path.lstrip("/"))
