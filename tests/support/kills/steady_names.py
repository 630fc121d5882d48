"""Changes of names that have no bytes, each looked at right after it: none is made twice or lost.

A server that was killed in the middle of one may have made it. The next server hears of the same
request again, and must neither refuse it (EEXIST, ENOENT) nor do it again.
"""

import os
import random
import stat
from typing import Final

from tests.support.kills.soak.owner import Fault

_NAMES_MAX: Final = 30


class Names:
    """The names of one client, in a directory of its own."""

    def __init__(self, directory: str, draw: random.Random) -> None:
        os.mkdir(directory)
        self._directory, self._draw = directory, draw
        #: What each name is: a directory, a link (its target), a fifo, an empty file.
        self._there: dict[str, str] = {}
        self._modes: dict[str, int] = {}
        self._attributes: dict[str, bytes] = {}
        self._serial = 0

    def step(self) -> None:
        """Change one name, or look at all."""
        changes = [self._make, self._make, self._list]
        if self._there:
            changes += [self._remove, self._move, self._change_mode, self._look]
            changes += [self._set_attribute, self._drop_attribute]
        if len(self._there) > _NAMES_MAX:
            changes = [self._remove]
        self._draw.choice(changes)()

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def _new(self) -> str:
        self._serial += 1
        return f"name-{self._serial}"

    def _some(self) -> str:
        return self._draw.choice(sorted(self._there))

    def _make(self) -> None:
        name = self._new()
        path = self._path(name)
        what = self._draw.choice(("directory", "link", "fifo", "file"))
        if what == "directory":
            os.mkdir(path)
        elif what == "link":
            os.symlink(f"to {name}", path)
        elif what == "fifo":
            os.mkfifo(path)
        else:  # by nobody else: a file that is there already is an error
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        self._there[name] = f"to {name}" if what == "link" else what
        self._look_at(name)

    def _remove(self) -> None:
        name = self._some()
        (os.rmdir if self._there.pop(name) == "directory" else os.unlink)(self._path(name))
        self._modes.pop(name, None)
        self._attributes.pop(name, None)
        self._must_be_gone(name)

    def _move(self) -> None:
        old, new = self._some(), self._new()
        os.rename(self._path(old), self._path(new))
        self._there[new] = self._there.pop(old)
        if old in self._modes:
            self._modes[new] = self._modes.pop(old)
        if old in self._attributes:
            self._attributes[new] = self._attributes.pop(old)
        self._must_be_gone(old)
        self._look_at(new)

    def _change_mode(self) -> None:
        name = self._some()
        if self._there[name].startswith("to "):
            return
        self._modes[name] = self._draw.choice((0o600, 0o640, 0o755))
        os.chmod(self._path(name), self._modes[name])
        self._look_at(name)

    def _set_attribute(self) -> None:
        name = self._some()
        if self._there[name] in ("directory", "file"):
            self._attributes[name] = b"%d" % self._draw.getrandbits(60)
            os.setxattr(self._path(name), "user.steady", self._attributes[name])
            self._look_at(name)

    def _drop_attribute(self) -> None:
        if self._attributes:
            name = self._draw.choice(sorted(self._attributes))
            del self._attributes[name]
            os.removexattr(self._path(name), "user.steady")
            self._look_at(name)

    def _look(self) -> None:
        self._look_at(self._some())

    def _look_at(self, name: str) -> None:
        path, what = self._path(name), self._there[name]
        mode = os.lstat(path).st_mode
        if what.startswith("to "):
            self._hold(name, os.readlink(path), what)
            return
        kind = {"directory": stat.S_IFDIR, "fifo": stat.S_IFIFO, "file": stat.S_IFREG}[what]
        self._hold(name, stat.S_IFMT(mode), kind)
        if name in self._modes:
            self._hold(name, stat.S_IMODE(mode), self._modes[name])
        if name in self._attributes:
            self._hold(name, os.getxattr(path, "user.steady"), self._attributes[name])

    def _must_be_gone(self, name: str) -> None:
        try:
            os.lstat(self._path(name))
        except FileNotFoundError:
            return
        raise Fault(f"{name} was removed or renamed, and is there")

    def _list(self) -> None:
        self._hold("the listing", sorted(os.listdir(self._directory)), sorted(self._there))

    @staticmethod
    def _hold(name: str, found: object, expected: object) -> None:
        if found != expected:
            raise Fault(f"{name}: {found!r}, not {expected!r}")
